"""Every error pagedlc raises on purpose, under one root.

Messages say what was wrong and what to do about it. Where a Python built-in exception means the same
thing (``ValueError``, ``FileNotFoundError`` …) the class inherits from it too, so ordinary handlers work.
"""

from __future__ import annotations

import copy
import traceback
from typing import Any, Final

__all__ = [
    "MAKE_ANEW",
    "ConfigError",
    "EngineClosedError",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelLoadError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PagedLCError",
    "PromptTooLongError",
    "UnsupportedModelError",
    "own_copy",
    "portable",
    "without_frames",
]


class PagedLCError(Exception):
    """Root of all errors raised by pagedlc."""

    #: Where one of several prompts fails on the way: an output for each prompt that was finished, ``None`` for each
    #: other. ``None`` altogether where nothing had begun, and for streams.
    outputs: list[Any] | None = None


class ConfigError(PagedLCError, ValueError):
    """An engine or integration option is unknown or has a value that cannot work."""


class ModelLoadError(PagedLCError):
    """The model's files cannot be read: truncated, damaged, or missing a tensor."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """Nothing that could be a model lies at the given path or under the given name."""


class UnsupportedModelError(ModelLoadError):
    """The files are a model, but of an architecture or format the engine cannot run."""


class InvalidRequestError(PagedLCError, ValueError):
    """A request asks for something that is not allowed: empty prompt, bad sampling value, no chat template."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt and its answer, cannot fit the model's context or the KV cache."""


class OutOfMemoryError(PagedLCError, MemoryError):
    """Memory for weights or KV cache could not be allocated; the message names the option to change."""


class EngineClosedError(PagedLCError, RuntimeError):
    """The engine was closed before or while the request ran."""


#: What to do about a dead engine, in the terms of those who have none in their hands.
MAKE_ANEW: Final = "Make a new LLM (or VLLMChat, VLLM, Vllm): it starts another engine."


class EngineDeadError(PagedLCError, RuntimeError):
    """The engine's loop ended by an error that was nobody's request; whatever used it has to be made anew."""


def own_copy(error: PagedLCError) -> PagedLCError:
    """The same error for one more caller: an exception collects the frames of everyone who raises it."""
    made = copy.copy(error)
    made.__cause__ = error.__cause__
    return made


def portable(error: PagedLCError) -> PagedLCError:
    """A copy that can be pickled without loss: the cause's traceback becomes a note."""
    made = copy.copy(error)
    if error.__cause__ is not None:
        cause = "".join(traceback.format_exception(error.__cause__)).rstrip()
        made.__notes__ = [*getattr(error, "__notes__", ()), f"Caused, in the engine's process, by:\n{cause}"]
    return made


def without_frames(error: BaseException) -> BaseException:
    """Let go of the variables in an error's frames, which may be a whole model; the traceback stays readable."""
    traceback.clear_frames(error.__traceback__)
    return error

"""Sorting out what people pass to the constructor and to a call.

LlamaIndex's own ``Vllm`` is a thin cover over a vLLM server or engine, so its users bring vLLM options that
have no counterpart here. Where such an option would change nothing it is taken and dropped; where it asks for
something that will not happen, the error says what to do instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pagedlc import LLM, SamplingParams
from pagedlc.foreign import FOREIGN_OPTIONS, refuse_foreign
from pagedlc.turns import Interruption
from pagedlc_engine.config import EngineConfig, check_option_names
from pagedlc_engine.errors import ConfigError, InvalidRequestError

__all__ = [
    "TEMPLATE_OPTIONS",
    "TOOL_OPTIONS",
    "SplitCall",
    "SplitOptions",
    "interruption",
    "merge_engine_options",
    "sampling_params",
    "split_call",
    "split_options",
]

#: What a call may bring besides sampling parameters, for the engine.
CALL_OPTIONS = frozenset({"cache_salt", "priority"})
#: What a call that goes through the chat template may bring, for :class:`pagedlc.tools.ChatTurn`.
TEMPLATE_OPTIONS = frozenset({"add_generation_prompt", "chat_template_kwargs", "continue_final_message", "reasoning"})
#: How a call may be cut short.
INTERRUPTION_OPTIONS = frozenset({"barge_in", "conversation_id", "run_id", "stop_when"})
#: As the template options, for calls whose answer may hold tool calls.
TOOL_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "tool_call_format"})


@dataclass(frozen=True)
class SplitOptions:
    """Keyword options of the constructor by where they belong."""

    engine: dict[str, Any]
    sampling: dict[str, Any]
    framework: dict[str, Any]


def split_options(options: Mapping[str, Any], framework_names: Collection[str]) -> SplitOptions:
    """Sort constructor keywords into engine options, sampling parameters and fields of the framework's class.

    A name that is both an engine option and a sampling parameter (``seed``) is the sampling parameter: it makes
    answers repeatable, and instances with different values still share an engine.

    Args:
        options: Keywords that are not named in the constructor's signature.
        framework_names: Names the class itself knows; also candidates for suggestions.

    Raises:
        ConfigError: An option is unknown (the nearest known name is suggested), or has no meaning here.
    """
    engine_names = _engine_option_names()
    sampling_names = SamplingParams.model_fields
    check_option_names(options, {*engine_names, *sampling_names, *framework_names, *FOREIGN_OPTIONS})
    split = SplitOptions({}, {}, {})
    for name, value in options.items():
        if name in sampling_names:
            split.sampling[name] = value
        elif name in engine_names:
            split.engine[name] = value
        elif name in framework_names:
            split.framework[name] = value
        else:
            refuse_foreign(name, value)
    return split


def merge_engine_options(direct: Mapping[str, Any], vllm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options given as keywords and inside ``vllm_kwargs``, as one dict.

    Raises:
        ConfigError: An option is unknown, has no meaning here, or was given twice with different values.
    """
    engine_names = _engine_option_names()
    check_option_names(vllm_kwargs, {*engine_names, *FOREIGN_OPTIONS})
    merged = dict(direct)
    for name, value in vllm_kwargs.items():
        if name not in engine_names:
            refuse_foreign(name, value)
        elif name in merged and merged[name] != value:
            raise ConfigError(
                f"{name} is {merged[name]!r} as a keyword and {value!r} in vllm_kwargs; give it in one place."
            )
        else:
            merged[name] = value
    return merged


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Build :class:`SamplingParams` from vLLM's names plus ``max_new_tokens`` and ``best_of``.

    Raises:
        InvalidRequestError: A name is unknown, a value out of range, or two names contradict each other.
    """
    params = dict(values)
    best_of = params.pop("best_of", None)
    if best_of is not None and best_of != params.get("n", 1):
        raise InvalidRequestError(
            f"best_of={best_of} is not supported: leave it out and set n to get several answers to choose from."
        )
    if "max_new_tokens" in params:
        params["max_tokens"] = params.pop("max_new_tokens")
    return SamplingParams(**{name: value for name, value in params.items() if not _unset(name, value)})


@dataclass(frozen=True)
class SplitCall:
    """A call's keywords by where they belong."""

    sampling: dict[str, Any]
    request: dict[str, Any]
    turn: dict[str, Any]
    interruption: dict[str, Any]


def split_call(kwargs: Mapping[str, Any], turn_options: Collection[str]) -> SplitCall:
    """Sort a call's keywords; ``max_tokens`` gets its LlamaIndex name.

    Args:
        kwargs: What the call brings.
        turn_options: Names that go to the turn; what is unknown counts as a sampling parameter.

    Raises:
        InvalidRequestError: ``max_tokens`` and ``max_new_tokens`` contradict each other, or there are tools where
            there can be no calls.
    """
    split = SplitCall({}, {}, {}, {})
    for name, value in kwargs.items():
        if name in turn_options:
            split.turn[name] = value
        elif name in CALL_OPTIONS:
            split.request[name] = value
        elif name in INTERRUPTION_OPTIONS:
            split.interruption[name] = value
        elif name in TOOL_OPTIONS:
            raise InvalidRequestError(
                f"{name} needs a conversation that goes through the model's chat template: call chat() or one of its "
                "variants, without a messages_to_prompt of your own."
            )
        else:
            split.sampling[name] = value
    if "max_tokens" in split.sampling:
        limit = split.sampling.pop("max_tokens")
        if split.sampling.setdefault("max_new_tokens", limit) != limit:
            raise InvalidRequestError("max_tokens and max_new_tokens name the same limit; give one of them.")
    return split


def interruption(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Interruption:
    """How an answer may be cut short.

    Args:
        values: The call's keywords.
        defaults: ``conversation_id`` and ``barge_in`` of calls that bring none.

    Raises:
        InvalidRequestError: The call is to barge in, but into no conversation.
    """
    chosen = {**defaults, **values}
    if values.get("barge_in") and chosen["conversation_id"] is None:
        raise InvalidRequestError("barge_in needs a conversation_id: it says which conversation is cut into.")
    run_id = chosen.pop("run_id", None)
    return Interruption(names=() if run_id is None else (str(run_id),), **chosen)


def _unset(name: str, value: Any) -> bool:
    return value is None and name != "max_tokens"


def _engine_option_names() -> frozenset[str]:
    of_llm = {
        name
        for name, parameter in inspect.signature(LLM.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return frozenset({*of_llm, *EngineConfig.model_fields} - {"model"})

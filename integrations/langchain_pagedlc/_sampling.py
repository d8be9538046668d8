"""Sampling parameters as fields of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from pagedlc import StructuredOutputsParams

__all__ = ["SAMPLING_ALIASES", "SamplingFields"]

#: Other spellings of sampling parameters, as constructor keyword and per call.
SAMPLING_ALIASES: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}


class SamplingFields(BaseModel):
    """Mixin: sampling parameters with vLLM's names, and how the engine should treat the request."""

    n: int = 1
    """Answers per prompt. ``generate`` gives all of them, ``invoke`` the first."""

    temperature: float = 1.0
    """0 is greedy; otherwise the higher, the more random."""

    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""

    top_k: int = -1
    """Keep the k likeliest tokens; 0 or -1 keeps all."""

    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""

    min_tokens: int = 0
    """No end before this many tokens."""

    presence_penalty: float = 0.0
    """Subtracted once from each token already generated."""

    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the generated tokens."""

    repetition_penalty: float = 1.0
    """Above 1 makes tokens seen in prompt or answer less likely."""

    seed: int | None = None
    """Makes sampling repeatable."""

    stop: list[str] | str | None = None
    """Strings that end the answer and are not part of it. A call's ``stop`` replaces them."""

    stop_token_ids: list[int] | None = None
    """Token ids that end the answer."""

    ignore_eos: bool = False
    """Go on after end-of-sequence."""

    logit_bias: dict[int, float] | None = None
    """Token id to a value added to its logit."""

    bad_words: list[str] | None = None
    """Strings that must not be generated."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""

    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    """What the answer must look like; see ``pagedlc.StructuredOutputsParams``."""

    priority: int = 0
    """Smaller runs first."""

    cache_salt: str | None = None
    """Cached prompt prefixes are shared only between requests of the same salt."""

    def _stop_list(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

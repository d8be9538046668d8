"""One call of a model: what it overrides, and what goes to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from langchain_pagedlc._results import Describer
from langchain_pagedlc._sampling import SAMPLING_ALIASES
from pagedlc import ConfigError, InvalidRequestError, SamplingParams
from pagedlc_engine.config import check_option_names

__all__ = ["CALL_OPTIONS", "Call", "call_values", "logprobs_wanted", "own_logprobs"]

#: LangChain has no place for these in an answer.
_WITHOUT_PLACE: Final = {"prompt_logprobs"}

#: What every call may override, beside what a class adds.
CALL_OPTIONS: Final = (frozenset(SamplingParams.model_fields) - _WITHOUT_PLACE) | {"priority", "cache_salt"}

#: LangChain's own switch for streaming; it reaches the model but is not meant for it.
_LANGCHAIN_SWITCHES: Final = {"stream"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call apart from its prompts.

    Args:
        params: How to sample.
        options: Further keywords of the methods of ``pagedlc.LLM``.
        describer: Writes the answer in LangChain's terms.
    """

    params: SamplingParams
    options: dict[str, Any]
    describer: Describer

    def single(self) -> Self:
        """This call, for a stream.

        Raises:
            InvalidRequestError: It asks for several answers.
        """
        if self.params.n > 1:
            raise InvalidRequestError(
                f"A stream has one answer, and n={self.params.n} asks for more: use generate() or n=1."
            )
        return self


def call_values(
    own: Mapping[str, Any],
    stop: Sequence[str] | None,
    overrides: Mapping[str, Any],
    extra_names: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Values of one call: the model's own, replaced by what the call gives.

    Args:
        own: Call option to the model's own value.
        stop: The call's ``stop``, or ``None`` for the model's.
        overrides: Keywords of the call (``invoke(..., temperature=0)``, ``bind(temperature=0)``).
        extra_names: Call options the class has beyond :data:`CALL_OPTIONS`.

    Raises:
        InvalidRequestError: A keyword is not an option of a call; the nearest is named.
    """
    known = {*CALL_OPTIONS, *extra_names, *SAMPLING_ALIASES, *_LANGCHAIN_SWITCHES}
    try:
        check_option_names(overrides, known)
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from None
    # Of an option under two names the later counts: what was bound comes before what the call brings.
    given = {
        SAMPLING_ALIASES.get(name, name): value for name, value in overrides.items() if name not in _LANGCHAIN_SWITCHES
    }
    return {**own, **given, **({} if stop is None else {"stop": stop})}


def own_logprobs(own: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own values less the number that a call gives under the other of its two names."""
    left = dict(own)
    if type(overrides.get("logprobs")) is int:
        left["top_logprobs"] = None
    if overrides.get("top_logprobs") is not None and type(own["logprobs"]) in (bool, int):
        left["logprobs"] = None
    return left


def logprobs_wanted(logprobs: bool | int | None, top_logprobs: int | None) -> int | None:
    """One number for the engine from vLLM's (a number) or OpenAI's (a switch and a number) way of asking.

    Raises:
        InvalidRequestError: Both are numbers, and differ.
    """
    if logprobs is False:
        return None
    if top_logprobs is None:
        return 0 if logprobs is True else logprobs
    # By identity: 1 == True, and is a number.
    if logprobs is not None and logprobs is not True and logprobs != top_logprobs:
        raise InvalidRequestError(
            f"logprobs={logprobs!r} and top_logprobs={top_logprobs!r} are the same option: leave one out."
        )
    return top_logprobs

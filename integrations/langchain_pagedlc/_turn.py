"""One call of the chat model: the turn of the conversation, and what ends it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from langchain_pagedlc._results import Describer
from pagedlc import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from pagedlc.tools import ChatTurn, TurnDelta
from pagedlc.turns import Interruption, astream_turn, stream_turn

__all__ = ["ChatCall", "structured_outputs_of"]


def structured_outputs_of(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """What OpenAI's ``response_format`` asks for, in the engine's terms.

    Raises:
        InvalidRequestError: It is not one of OpenAI's forms.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if schema is not None:
            return StructuredOutputsParams(json=schema)
    raise InvalidRequestError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'schema': {...}}}, {'type': 'json_object'} "
        f"or {{'type': 'text'}}, not {response_format!r}."
    )


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call apart from its conversation.

    Args:
        params: How to sample.
        turn_options: Keywords of :class:`pagedlc.tools.ChatTurn`.
        request_options: ``priority`` and ``cache_salt``.
        interruption: What ends the answer early.
        describer: Writes the answer in LangChain's terms.
    """

    params: SamplingParams
    turn_options: dict[str, Any]
    request_options: dict[str, Any]
    interruption: Interruption
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

    def named(self, *names: object) -> Self:
        """This call, to be interrupted by these names, too."""
        known = tuple(str(name) for name in names if name is not None)
        return replace(self, interruption=replace(self.interruption, names=known))

    def turn(self, llm: LLM, messages: Sequence[Mapping[str, Any]], *, must_fit: bool = True) -> ChatTurn:
        """The turn of a conversation that this call is; without ``must_fit`` only to be looked at."""
        return ChatTurn(llm, messages, **self.turn_options, must_fit=must_fit)

    def stream(
        self, llm: LLM, messages: Sequence[Mapping[str, Any]], *, whole: bool = False
    ) -> Generator[TurnDelta, None, None]:
        """Answer, piece by piece; ``whole``: nobody looks before the answer is finished."""
        turn = self.turn(llm, messages)
        return stream_turn(llm, turn, self.params, self.interruption, whole=whole, **self.request_options)

    async def astream(
        self, llm: LLM, messages: Sequence[Mapping[str, Any]], *, whole: bool = False
    ) -> AsyncGenerator[TurnDelta, None]:
        """:meth:`stream` for asyncio, once awaited. Long prompts are tokenized beside the loop, not on it."""
        turn = await llm.beside.run(partial(self.turn, llm, messages))
        return astream_turn(llm, turn, self.params, self.interruption, whole=whole, **self.request_options)

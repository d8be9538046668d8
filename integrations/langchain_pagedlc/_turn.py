"""One call of the chat model: the turn of the conversation, and what ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from langchain_pagedlc._results import Describer
from pagedlc import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from pagedlc.tools import CallGrammar, ChatTurn, TurnDelta
from pagedlc.turns import Interruption, astream_turn, stream_turn

__all__ = ["ChatCall", "FormedTurn", "structured_outputs_of"]


class FormedTurn(ChatTurn):
    """A turn whose answer may have to have a form, beside tools and after thoughts.

    With tools, ``structured_outputs`` of the parameters is the form of an answer that calls none.
    """

    def sampling_params(self, params: SamplingParams) -> SamplingParams:
        """See :meth:`ChatTurn.sampling_params`."""
        form = params.structured_outputs
        if form is None:
            return super().sampling_params(params)
        free = super().sampling_params(params.replace(structured_outputs=None))
        return free.replace(structured_outputs=self._form(form))

    def _form(self, form: StructuredOutputsParams) -> StructuredOutputsParams:
        if self.choice.mode == "required":
            return self._calls_only().to_structured_outputs()
        if not self.choice.active and not self._thinking:
            return form
        answer = _as_tag(form)
        if self._thinking and self._tags is not None:
            closing = {"type": "const_string", "value": self._tags.closing}
            blank = {"type": "regex", "pattern": r"[ \n]{0,4}"}
            answer = {"type": "sequence", "elements": [{"type": "any_text"}, closing, blank, answer]}
        if self.choice.active:
            calls = json.loads(self._calls_only().to_structured_outputs().structural_tag)
            answer = {"type": "or", "elements": [calls, answer]}
        return StructuredOutputsParams(structural_tag=answer, disable_any_whitespace=True)

    def _calls_only(self) -> CallGrammar:
        grammar = self.grammar
        assert grammar is not None
        return replace(grammar, required=True)


def _as_tag(form: StructuredOutputsParams) -> dict[str, Any]:
    """A form as a piece of a structural tag."""
    match form.kind:
        case "json":
            return {"type": "json_schema", "json_schema": json.loads(form.json)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": form.regex}
        case "choice":
            options = [{"type": "const_string", "value": option} for option in form.choice or ()]
            return {"type": "or", "elements": options}
        case "grammar":
            return {"type": "grammar", "grammar": form.grammar}
        case _:
            tag: dict[str, Any] = json.loads(form.structural_tag)
            inner: dict[str, Any] = tag.get("format", tag)
            return inner


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

    def turn(self, llm: LLM, messages: Sequence[Mapping[str, Any]]) -> ChatTurn:
        """The turn of a conversation that this call is."""
        return FormedTurn(llm, messages, **self.turn_options)

    def stream(self, llm: LLM, messages: Sequence[Mapping[str, Any]]) -> Generator[TurnDelta, None, None]:
        """Answer, piece by piece."""
        turn = self.turn(llm, messages)
        return stream_turn(llm, turn, self.params, self.interruption, **self.request_options)

    async def astream(self, llm: LLM, messages: Sequence[Mapping[str, Any]]) -> AsyncGenerator[TurnDelta, None]:
        """:meth:`stream` for asyncio, once awaited. Long prompts are tokenized beside the loop, not on it."""
        turn = await asyncio.to_thread(self.turn, llm, messages)
        return astream_turn(llm, turn, self.params, self.interruption, **self.request_options)

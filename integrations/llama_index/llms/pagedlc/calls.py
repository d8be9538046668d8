"""Asking the engine: one call, four ways (whole or streamed, blocking or async)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import pagedlc
from llama_index.llms.pagedlc.responses import Answer, AnswerCollector
from llama_index.llms.pagedlc.text import TextTurn
from pagedlc.tools import ChatTurn, TurnDelta
from pagedlc.turns import Interruption, astream_turn, stream_turn
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["Call", "aanswer", "answer", "astream", "prompt_token_ids", "stream"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Args:
        prompt: Text that goes in as it is, or message dicts for the chat template.
        params: How to sample.
        request: Keywords for the engine: ``priority``, ``cache_salt``.
        turn: Keywords of :class:`pagedlc.tools.ChatTurn`; only with message dicts.
        interruption: How the answer may be cut short.
    """

    prompt: str | list[dict[str, Any]]
    params: pagedlc.SamplingParams
    request: dict[str, Any]
    turn: dict[str, Any]
    interruption: Interruption


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call whose prompt is rendered."""

    llm: pagedlc.LLM
    call: Call
    turn: ChatTurn
    collector: AnswerCollector

    def deltas(self, *, whole: bool = False) -> Generator[TurnDelta, None, None]:
        call = self.call
        return stream_turn(self.llm, self.turn, call.params, call.interruption, whole=whole, **call.request)

    def adeltas(self, *, whole: bool = False) -> AsyncGenerator[TurnDelta, None]:
        call = self.call
        return astream_turn(self.llm, self.turn, call.params, call.interruption, whole=whole, **call.request)


def _ask(llm: pagedlc.LLM, call: Call) -> _Asked:
    call.interruption.check(call.params)
    if isinstance(call.prompt, str):
        turn = cast(ChatTurn, TextTurn(llm, call.prompt))  # can all that is needed here
    else:
        turn = ChatTurn(llm, call.prompt, **call.turn)
    return _Asked(llm, call, turn, AnswerCollector(llm.model_name, llm.tokenizer.token_text))


def prompt_token_ids(llm: pagedlc.LLM, call: Call) -> list[int]:
    """The tokens that go into the engine."""
    if isinstance(call.prompt, str):
        return list(llm.tokenizer.encode(call.prompt))
    return ChatTurn(llm, call.prompt, **call.turn).prompt_token_ids


def answer(llm: pagedlc.LLM, call: Call) -> Answer:
    """Wait for the whole answer."""
    asked = _ask(llm, call)
    with closing(asked.deltas(whole=True)) as deltas:
        for delta in deltas:
            asked.collector.add(delta)
    return asked.collector.whole()


async def aanswer(llm: pagedlc.LLM, call: Call) -> Answer:
    """Await the whole answer; cancelling the task ends the request."""
    # In a thread: rendering takes a while for long conversations, and reading the tokenizer the first time.
    asked = await llm.beside.run(partial(_ask, llm, call))
    async with aclosing(asked.adeltas(whole=True)) as deltas:
        async for delta in deltas:
            asked.collector.add(delta)
    return asked.collector.whole()


def stream(llm: pagedlc.LLM, call: Call, convert: Callable[[Answer], R]) -> Generator[R, None, None]:
    """The answer so far, converted, with every new piece; closing the generator ends the request.

    Raises:
        InvalidRequestError: The call asks for several answers.
    """
    _refuse_several_answers(call)
    asked = _ask(llm, call)

    def parts() -> Generator[R, None, None]:
        with closing(asked.deltas()) as deltas:
            for delta in deltas:
                if (so_far := asked.collector.piece(delta)) is not None:
                    yield convert(so_far)

    return parts()


async def astream(llm: pagedlc.LLM, call: Call, convert: Callable[[Answer], R]) -> AsyncGenerator[R, None]:
    """As :func:`stream`, for ``async for``."""
    _refuse_several_answers(call)
    asked = await llm.beside.run(partial(_ask, llm, call))

    async def parts() -> AsyncGenerator[R, None]:
        async with aclosing(asked.adeltas()) as deltas:
            async for delta in deltas:
                if (so_far := asked.collector.piece(delta)) is not None:
                    yield convert(so_far)

    return parts()


def _refuse_several_answers(call: Call) -> None:
    if call.params.n > 1:
        raise InvalidRequestError(f"A stream gives one answer, but n is {call.params.n}; set n=1 or do not stream.")

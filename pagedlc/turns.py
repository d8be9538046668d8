"""Turns of a conversation that can be interrupted: by name, by the next turn, or by what they say."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, aclosing, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pagedlc.interruption import RunningAnswer
from pagedlc.tools import AnswerEvent, ChatTurn, MessageFinish, TextDelta, ToolCall, ToolCallEnd, TurnDelta
from pagedlc_engine.errors import InvalidRequestError
from pagedlc_engine.request import SamplingParams

if TYPE_CHECKING:
    from pagedlc.llm import LLM

__all__ = ["INTERRUPTED", "Interruption", "astream_turn", "stream_turn"]

#: ``finish_reason`` of an answer that was cut short.
INTERRUPTED: Final = "interrupted"
_CUT_CALL: Final = "The answer was interrupted in the middle of this call."
#: The error of a call that goes on.
_OPEN: Final = ToolCall(0, "", "").error


@dataclass(frozen=True, slots=True)
class Interruption:
    """How a turn may be cut short. Its text so far stays, and ``finish_reason`` is ``"interrupted"``.

    Args:
        stop_when: Called with the text so far whenever there is more, which may be several tokens; the answer ends
            when it says so.
        names: Names for :meth:`pagedlc.LLM.interrupt`, beside the conversation's.
        conversation_id: The conversation the turn belongs to, also a name.
        barge_in: Interrupt what the conversation is still generating. Without a conversation, nothing is.
    """

    stop_when: Callable[[str], bool] | None = None
    names: tuple[str, ...] = ()
    conversation_id: str | None = None
    barge_in: bool = False

    def check(self, params: SamplingParams) -> None:
        """See whether these can be used, and go together.

        Raises:
            InvalidRequestError: They do not.
        """
        if not isinstance(self.conversation_id, str | None):
            raise InvalidRequestError(
                f"conversation_id must be a string, not {self.conversation_id!r}: give its str()."
            )
        if self.stop_when is not None and not callable(self.stop_when):
            raise InvalidRequestError(
                "stop_when must be a function that takes the text so far and returns whether to end the answer, "
                f"not {self.stop_when!r}; texts at which to end go into stop."
            )
        if self.stop_when is not None and params.n > 1:
            raise InvalidRequestError(f"stop_when watches one answer, and n={params.n} asks for more: use n=1.")


def stream_turn(
    llm: LLM,
    turn: ChatTurn,
    params: SamplingParams,
    interruption: Interruption,
    *,
    whole: bool = False,
    **request_options: Any,
) -> Generator[TurnDelta, None, None]:
    """:meth:`ChatTurn.stream` for a turn that can be interrupted.

    Args:
        llm: The model the turn was made for.
        turn: The turn.
        params: The caller's parameters.
        interruption: How it may be cut short.
        whole: As for :meth:`ChatTurn.stream`; without effect where ``stop_when`` looks at the text.
        request_options: ``priority`` and ``cache_salt``.

    Raises:
        InvalidRequestError: Options that do not go together.
    """
    interruption.check(params)
    unwatched = whole and interruption.stop_when is None
    with (
        _running(llm, interruption) as answer,
        closing(turn.stream(params, whole=unwatched, request_id=answer.request_id, **request_options)) as deltas,
    ):
        for delta in deltas:
            ends = _interrupt(delta, answer, interruption.stop_when)
            yield delta if ends is None else ends
            if ends is not None and params.n == 1:
                return


async def astream_turn(
    llm: LLM,
    turn: ChatTurn,
    params: SamplingParams,
    interruption: Interruption,
    *,
    whole: bool = False,
    **request_options: Any,
) -> AsyncGenerator[TurnDelta, None]:
    """:func:`stream_turn` for asyncio."""
    interruption.check(params)
    unwatched = whole and interruption.stop_when is None
    with _running(llm, interruption) as answer:
        stream = turn.astream(params, whole=unwatched, request_id=answer.request_id, **request_options)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                ends = _interrupt(delta, answer, interruption.stop_when)
                yield delta if ends is None else ends
                if ends is not None and params.n == 1:
                    return


def _running(llm: LLM, interruption: Interruption) -> AbstractContextManager[RunningAnswer]:
    conversation = interruption.conversation_id
    names = interruption.names if conversation is None else (*interruption.names, conversation)
    return llm.running.running(llm.abort, names, conversation if interruption.barge_in else None)


def _interrupt(delta: TurnDelta, answer: RunningAnswer, stop_when: Callable[[str], bool] | None) -> TurnDelta | None:
    """The delta as the last one of an interrupted answer; ``None`` if it is not that."""
    reason = delta.message.finish_reason
    if reason == "abort" and answer.interrupted:
        return _ended(delta, answer, [])
    if reason is not None or answer.interrupted:
        return None
    if stop_when is not None and _says_more(delta) and stop_when(delta.message.text):
        answer.interrupted = True
        return _ended(delta, answer, _cut_calls(delta))
    return None


def _says_more(delta: TurnDelta) -> bool:
    return any(isinstance(event, TextDelta) for event in delta.events)


def _cut_calls(delta: TurnDelta) -> list[ToolCallEnd]:
    return [ToolCallEnd(call.index, _CUT_CALL) for call in delta.message.tool_calls if call.error == _OPEN]


def _ended(delta: TurnDelta, answer: RunningAnswer, cut_calls: list[ToolCallEnd]) -> TurnDelta:
    more: list[AnswerEvent] = [*cut_calls, MessageFinish(INTERRUPTED)]
    delta.message.add(more)
    timings = delta.chunk.timings
    if timings.total_time is None:
        timings = replace(timings, total_time=time.monotonic() - answer.started)
    return replace(
        delta,
        chunk=replace(delta.chunk, finish_reason="abort", timings=timings),
        events=[*(event for event in delta.events if not isinstance(event, MessageFinish)), *more],
    )

"""From an answer's chunks to its events: thoughts, text, tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from pagedlc.outputs import CompletionChunk, CompletionOutput
from pagedlc.reasoning import ReasoningSplitter
from pagedlc.tools.emitter import CUT_OFF, CUT_OFF_BEFORE
from pagedlc.tools.events import (
    AnswerEvent,
    ChatMessage,
    MessageFinish,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
    ToolEvent,
)
from pagedlc.tools.parser import CallParser, PlainParser
from pagedlc.tools.stops import TextStops

__all__ = ["MessageReader"]

_RAISE: Final = "max_tokens (or the end of the context) cut it off: raise max_tokens."


class MessageReader:
    """Reads one answer.

    Args:
        splitter: Takes thoughts out of the text.
        parser: Takes calls out of the rest.
        stops: Ends the text.
        min_tokens: Stop strings count only after this many tokens.

    Attributes:
        message: All that has been read so far.
    """

    def __init__(self, splitter: ReasoningSplitter, parser: CallParser, stops: TextStops, min_tokens: int = 0) -> None:
        self._splitter = splitter
        self._parser = parser
        self._stops = stops
        self._min_tokens = min_tokens
        self._plain = isinstance(parser, PlainParser) and not stops.any
        self.message = ChatMessage()

    @property
    def finished(self) -> bool:
        """Whether the answer is complete. If the engine has not noticed (a stop string), close the stream."""
        return self.message.finish_reason is not None

    def read(self, chunk: CompletionChunk) -> list[AnswerEvent]:
        """What a chunk adds; nothing once the answer is complete."""
        active = chunk.num_generated_tokens > self._min_tokens
        return self._read(chunk.text, active, chunk.finish_reason, chunk.stop_reason)

    def read_output(self, output: CompletionOutput) -> list[AnswerEvent]:
        """What a complete answer consists of."""
        return self._read(output.text, True, output.finish_reason, output.stop_reason)

    def _read(
        self, text: str, active: bool, finish_reason: str | None, stop_reason: int | str | None
    ) -> list[AnswerEvent]:
        if self.finished:
            return []
        events = self._events(self._splitter.feed(text), active)
        if finish_reason is not None and self._stops.matched is None:
            events += self._events(self._splitter.finish(), active)
            found = self._parser.finish(cut_off=finish_reason != "stop")
            events += self._stop(map(partial(_explain, finish_reason), found), active)
            if self._stops.matched is None and (rest := self._stops.flush()):
                events.append(TextDelta(rest))
        self.message.add(events)
        finish = self._finish(finish_reason, stop_reason)
        return [*events, finish] if finish else events

    def _finish(self, finish_reason: str | None, stop_reason: int | str | None) -> MessageFinish | None:
        if self._stops.matched is not None:
            finish_reason, stop_reason = "stop", self._stops.matched
        if finish_reason is None:
            return None
        if finish_reason == "stop" and self.message.tool_calls:
            finish_reason = "tool_calls"
        finish = MessageFinish(finish_reason, stop_reason)
        self.message.add([finish])
        return finish

    def _events(self, deltas: Iterable[ReasoningDelta | TextDelta], active: bool) -> list[AnswerEvent]:
        if self._plain:
            return [*deltas]
        events: list[AnswerEvent] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                events.append(delta)
            else:
                events += self._stop(self._parser.feed(delta.text), active)
        return events

    def _stop(self, found: Iterable[ToolEvent], active: bool) -> list[AnswerEvent]:
        """The events up to the first stop string in text."""
        events: list[AnswerEvent] = []
        for event in found:
            if self._stops.matched is not None:
                break
            if text := self._stops.feed(event.text, active) if isinstance(event, TextDelta) else self._stops.flush():
                events.append(TextDelta(text))
            if not isinstance(event, TextDelta):
                events.append(event)
        return events


def _explain(finish_reason: str, event: ToolEvent) -> ToolEvent:
    """Say what to do about a call that was cut off, where something can be done."""
    if finish_reason == "length" and isinstance(event, ToolCallEnd) and event.error in (CUT_OFF, CUT_OFF_BEFORE):
        return ToolCallEnd(event.index, f"{event.error} {_RAISE}")
    return event

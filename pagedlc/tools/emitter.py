"""Collects the events of an answer: numbers the calls, gives them ids, and judges them when they end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from typing import Final

from pagedlc.tools.events import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart, ToolEvent

__all__ = ["CUT_OFF", "CUT_OFF_BEFORE", "CallEmitter", "new_call_id"]

#: Errors of calls that the answer's end cut off.
CUT_OFF: Final = "The answer ended inside this call."
CUT_OFF_BEFORE: Final = "The answer ended where a tool call was about to begin."


def new_call_id() -> str:
    """``call_`` and 24 random letters and digits."""
    return f"call_{secrets.token_hex(12)}"


class CallEmitter:
    """The one place where events are made; neighbouring deltas of one kind become one.

    Args:
        names: The tools that may be called.
        make_id: Makes the id of each call.
    """

    def __init__(self, names: Collection[str], make_id: Callable[[], str] = new_call_id) -> None:
        self.names = frozenset(names)
        self._make_id = make_id
        self._events: list[ToolEvent] = []
        self._name: str | None = None
        self._arguments: list[str] = []
        self.num_calls = 0

    @property
    def calling(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._name is not None

    def take(self) -> list[ToolEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """More text of the answer."""
        if not text:
            return
        if self._events and isinstance(last := self._events[-1], TextDelta):
            self._events[-1] = TextDelta(last.text + text)
        else:
            self._events.append(TextDelta(text))

    def start(self, name: str) -> None:
        """A call begins."""
        self._name = name
        self._arguments = []
        self._events.append(ToolCallStart(self.num_calls, self._make_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        if not text:
            return
        index = self.num_calls - 1
        self._arguments.append(text)
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments) and last.index == index:
            self._events[-1] = ToolCallArguments(index, last.text + text)
        else:
            self._events.append(ToolCallArguments(index, text))

    def end(self, error: str | None = None) -> None:
        """The call is over; a call without any arguments gets ``{}``.

        Args:
            error: What is known to be wrong with it; without, name and arguments are checked.
        """
        if error is None and not self._arguments:
            self.arguments("{}")
        problem = error or self._problem()
        self._name = None
        self._events.append(ToolCallEnd(self.num_calls - 1, problem))

    def _problem(self) -> str | None:
        if self._name not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            return f"There is no tool {self._name!r} to be called here (tools: {known})."
        try:
            value = json.loads("".join(self._arguments))
        except ValueError as error:
            return f"The arguments are not valid JSON: {error}."
        if not isinstance(value, dict):
            return f"The arguments must be a JSON object, not {type(value).__name__}."
        return None

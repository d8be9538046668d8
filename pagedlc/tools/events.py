"""What a reader reports of an answer while it arrives, and the message that these events add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from pagedlc.reasoning import ReasoningDelta, TextDelta

__all__ = [
    "AnswerEvent",
    "ChatMessage",
    "MessageFinish",
    "ReasoningDelta",
    "TextDelta",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolEvent",
]


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Id and name come here and nowhere else.

    Args:
        index: Position among the answer's calls, from 0.
        id: Unique, made by the reader.
        name: The tool as the model wrote it; empty if the model never named one.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: the pieces of one index, joined, are the JSON text as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over.

    Args:
        index: Which call.
        error: ``None`` for a complete call of a declared tool with a JSON object as arguments; otherwise what is
            wrong with it.
    """

    index: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class MessageFinish:
    """The answer is over.

    Args:
        reason: ``tool_calls`` if the model ended by itself and called a tool; otherwise the completion's
            ``finish_reason``.
        stop_reason: The stop string or stop token id that ended it.
    """

    reason: str
    stop_reason: int | str | None = None


ToolEvent: TypeAlias = TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
AnswerEvent: TypeAlias = ToolEvent | ReasoningDelta | MessageFinish


@dataclass(slots=True)
class ToolCall:
    """One call of a tool.

    Args:
        index: Position among the answer's calls.
        id: Unique.
        name: The tool; empty if the model never named one.
        arguments: JSON text of an object; for an invalid call, whatever the model wrote.
        error: What is wrong with the call; ``None`` if nothing is.
    """

    index: int
    id: str
    name: str
    arguments: str = ""
    error: str | None = "The call has not ended yet."

    @property
    def valid(self) -> bool:
        """Whether the call can be carried out."""
        return self.error is None


@dataclass(slots=True)
class ChatMessage:
    """An answer, added up from its events.

    Args:
        text: What the model says.
        reasoning: What it thought before.
        tool_calls: Its calls, valid or not, by index.
        finish_reason: Why it ended; ``None`` while it goes on.
        stop_reason: The stop string or stop token id that ended it.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Take in the next events."""
        for event in events:
            match event:
                case TextDelta(text):
                    self.text += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallStart(index, id, name):
                    self.tool_calls.append(ToolCall(index, id, name))
                case ToolCallArguments(index, text):
                    self.tool_calls[index].arguments += text
                case ToolCallEnd(index, error):
                    self.tool_calls[index].error = error
                case MessageFinish(reason, stop_reason):
                    self.finish_reason, self.stop_reason = reason, stop_reason

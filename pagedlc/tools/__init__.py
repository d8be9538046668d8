"""Tool calls: formats of the model families, streaming parsers, grammars, and the turn of a conversation."""

from pagedlc.tools.events import (
    AnswerEvent,
    ChatMessage,
    MessageFinish,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolEvent,
)
from pagedlc.tools.formats import FORMATS, RenderInput, ToolCallFormat, choose_format
from pagedlc.tools.grammar import CallGrammar, CallRule
from pagedlc.tools.parser import CallParser, CallSyntax, ToolCallParser
from pagedlc.tools.reader import MessageReader
from pagedlc.tools.spec import ToolChoice, ToolSpec, resolve_choice, tool_specs
from pagedlc.tools.turn import ChatTurn, TurnDelta

__all__ = [
    "FORMATS",
    "AnswerEvent",
    "CallGrammar",
    "CallParser",
    "CallRule",
    "CallSyntax",
    "ChatMessage",
    "ChatTurn",
    "MessageFinish",
    "MessageReader",
    "ReasoningDelta",
    "RenderInput",
    "TextDelta",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallFormat",
    "ToolCallParser",
    "ToolCallStart",
    "ToolChoice",
    "ToolEvent",
    "ToolSpec",
    "TurnDelta",
    "choose_format",
    "resolve_choice",
    "tool_specs",
]

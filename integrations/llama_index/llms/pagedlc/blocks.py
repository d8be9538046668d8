"""Answers as LlamaIndex's content blocks, whole or while they are being written."""

from __future__ import annotations

import json
import re
from typing import Any

from llama_index.core.base.llms.types import ContentBlock, TextBlock, ThinkingBlock, ToolCallBlock
from pydantic_core import from_json

from pagedlc.tools import ChatMessage, ToolCall

__all__ = ["answer_blocks", "parse_partial", "tool_call_dicts"]


#: A number at the end of unfinished JSON may go on.
_OPEN_NUMBER = re.compile(r"(?<=[\s:,\[])-?\d[\d.eE+-]*\Z")


def answer_blocks(message: ChatMessage) -> list[ContentBlock]:
    """Thoughts if there are any, the text, and the calls.

    A call that is still being written has the arguments that are known so far. In a finished answer, calls that cannot
    be carried out are left out: nobody should run a tool with half its arguments.
    """
    thoughts: list[ContentBlock] = [ThinkingBlock(content=message.reasoning)] if message.reasoning else []
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=_arguments(call))
        for call in _shown(message)
    ]
    return [*thoughts, TextBlock(text=message.text), *calls]


def tool_call_dicts(message: ChatMessage) -> list[dict[str, Any]]:
    """The same calls in OpenAI's form; arguments are JSON text, which is valid at any time."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments_text(call)}}
        for call in _shown(message)
    ]


def parse_partial(text: str) -> dict[str, Any]:
    """What is known of a JSON object of which ``text`` is the beginning; texts in it may be incomplete."""
    try:
        value = from_json(_OPEN_NUMBER.sub("", text), allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shown(message: ChatMessage) -> list[ToolCall]:
    return [call for call in message.tool_calls if call.valid or message.finish_reason is None]


def _arguments(call: ToolCall) -> dict[str, Any]:
    return parse_partial(call.arguments)


def _arguments_text(call: ToolCall) -> str:
    return call.arguments if call.valid else json.dumps(_arguments(call), ensure_ascii=False)

"""Answers in a conversation's history, whoever gave them: text, thoughts and tool calls told apart."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from langchain_core.messages import AIMessage

from langchain_pagedlc._blocks import block_kind, block_text, block_value

__all__ = ["translate_answer"]

#: Calls by LangChain, by Anthropic and by OpenAI: where each has its arguments and its id.
_CALLS: Final = {
    "tool_call": ("args", "id"),
    "tool_use": ("input", "id"),
    "function_call": ("arguments", "call_id"),
}

_THOUGHTS: Final = {"reasoning", "thinking"}

#: What a provider did by itself within its answer (searched the web, ran code …), and what is no use to anyone else.
#: A call that was not valid JSON is left out, too: a template could not write it.
_NOT_FOR_OTHERS: Final = {"redacted_thinking", "invalid_tool_call", "input_json_delta", "non_standard"}
_SERVER_BEGINNINGS: Final = ("server_tool", "mcp_")
_SERVER_ENDINGS: Final = ("_tool_result", "_call", "_call_output")


def translate_answer(message: AIMessage) -> dict[str, Any]:
    """An answer as an OpenAI-style message: ``content``, and ``tool_calls`` and ``reasoning_content`` if it has them.

    Raises:
        InvalidRequestError: It holds something other than text, thoughts and calls, or a call without a name.
    """
    blocks: list[str | dict[str, Any]]
    blocks = [message.content] if isinstance(message.content, str) else message.content
    # The blocks of an answer are pieces of what the model wrote in one go, so nothing goes between them.
    text = "".join(block_text(block, message) for block in blocks if not _beside_text(block))
    translated: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts := _thoughts(blocks) or message.additional_kwargs.get("reasoning_content"):
        translated["reasoning_content"] = thoughts
    calls = [(call["name"], call["args"], call["id"]) for call in message.tool_calls] or _calls_in(blocks, message)
    if calls:
        translated["tool_calls"] = [_tool_call(*call) for call in calls]
    return translated


def _beside_text(block: str | dict[str, Any]) -> bool:
    kind = block_kind(block) or ""
    return (
        kind in _CALLS
        or kind in _THOUGHTS
        or kind in _NOT_FOR_OTHERS
        or kind.startswith(_SERVER_BEGINNINGS)
        or kind.endswith(_SERVER_ENDINGS)
    )


def _thoughts(blocks: Iterable[str | dict[str, Any]]) -> str:
    thoughts: list[str] = []
    for block in blocks:
        if isinstance(block, dict) and block_kind(block) in _THOUGHTS:
            summary = block.get("summary")
            parts = summary if isinstance(summary, list) else [summary]
            texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
            said = [block.get("reasoning") or block.get("thinking"), *texts]
            thoughts += (text for text in said if isinstance(text, str) and text)
    return "\n".join(thoughts)


def _calls_in(blocks: Iterable[str | dict[str, Any]], message: AIMessage) -> list[tuple[str, Any, str | None]]:
    """Calls that stand among the content only, as in messages made by hand from a provider's answer."""
    calls = []
    for block in blocks:
        kind = block_kind(block)
        if isinstance(block, dict) and kind in _CALLS:
            arguments, call_id = _CALLS[kind]
            calls.append((block_value(block, "name", message), block.get(arguments), block.get(call_id)))
    return calls


def _tool_call(name: str, arguments: Any, call_id: str | None) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}

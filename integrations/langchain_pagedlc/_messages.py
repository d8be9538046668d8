"""LangChain messages to the role/content dicts that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from pagedlc import InvalidRequestError

__all__ = ["to_chat_messages"]

#: Blocks whose text is text of the message: LangChain's text and plain-text document.
_TEXT_BLOCKS: Final = {"text", "text-plain"}

#: Blocks of an answer that travel outside its text, as ``tool_calls`` and ``reasoning_content``. A call that was
#: not valid JSON is left out: a template could not write it, and the tool's error message says what happened.
_BESIDE_TEXT: Final = {
    "tool_call",
    "tool_use",
    "function_call",
    "invalid_tool_call",
    "reasoning",
    "thinking",
    "redacted_thinking",
}

#: LangChain's names of the roles, as people write them in ``ChatMessage``.
_ROLE_NAMES: Final = {"human": "user", "ai": "assistant"}


def to_chat_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Translate a conversation.

    Args:
        messages: At least one message.

    Returns:
        One dict per message: ``role``, ``content`` and, where the message has them, ``name``, ``tool_calls``,
        ``tool_call_id`` and ``reasoning_content``, as in OpenAI's API.

    Raises:
        InvalidRequestError: No message, a message without a role in a conversation, or content that is not text.
    """
    if not messages:
        raise InvalidRequestError("The conversation is empty: give at least one message.")
    return [_translate(message) for message in messages]


def _translate(message: BaseMessage) -> dict[str, Any]:
    if isinstance(message, AIMessage):
        translated = _translate_answer(message)
    else:
        translated = {"role": _role(message), "content": _content(message)}
    if isinstance(message, ToolMessage):
        translated["tool_call_id"] = message.tool_call_id
    if message.name:
        translated["name"] = message.name
    return translated


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return _ROLE_NAMES.get(message.role, message.role)
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, SystemMessage):
        return "system"
    # Templates know the result of a call as "tool"; a function's result is the older name for the same thing.
    if isinstance(message, ToolMessage | FunctionMessage):
        return "tool"
    raise InvalidRequestError(
        f"A {type(message).__name__} cannot be sent to a model: use System, Human, AI, Tool, Function or ChatMessage."
    )


def _content(message: BaseMessage) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    return [{"type": "text", "text": _text(block, message)} for block in message.content]


def _translate_answer(message: AIMessage) -> dict[str, Any]:
    blocks: list[str | dict[str, Any]]
    blocks = [message.content] if isinstance(message.content, str) else message.content
    # The blocks of an answer are pieces of what the model wrote in one go, so nothing goes between them.
    text = "".join(_text(block, message) for block in blocks if _kind(block) not in _BESIDE_TEXT)
    translated: dict[str, Any] = {"role": "assistant", "content": text}
    thoughts = [block.get("reasoning") or block.get("thinking") for block in blocks if isinstance(block, dict)]
    if any(thoughts):
        translated["reasoning_content"] = "\n".join(thought for thought in thoughts if thought)
    if message.tool_calls:
        translated["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return translated


def _kind(block: str | dict[str, Any]) -> str | None:
    if isinstance(block, str):
        return "text"
    return block.get("type", "text" if "text" in block else None)


def _text(block: str | dict[str, Any], message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind = _kind(block)
    if kind in _TEXT_BLOCKS and isinstance(block.get("text"), str):
        return str(block["text"])
    raise InvalidRequestError(
        f"Content of type {kind!r} in a {type(message).__name__} is not supported: this model reads text only."
    )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call["args"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}

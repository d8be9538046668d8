"""LlamaIndex chat messages as the plain message dicts that ``pagedlc.LLM.chat`` takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import ValidationError

from pagedlc_engine.config import validation_message
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["as_chat_messages", "to_message_dicts", "with_system_prompt"]

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}

#: Entries of ``ChatMessage.additional_kwargs`` that chat templates know.
_CARRIED = ("name", "tool_call_id", "tool_calls")


def as_chat_messages(messages: Any) -> list[ChatMessage]:
    """A conversation given as messages or as dicts like these.

    Raises:
        InvalidRequestError: It is no list, or holds something else.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            "messages must be a list of ChatMessage, or of mappings like {'role': 'user', 'content': 'Hello'}, "
            f"not {type(messages).__name__}."
        )
    return [_as_chat_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _as_chat_message(message: Any, where: str) -> ChatMessage:
    if not isinstance(message, ChatMessage | Mapping):
        raise InvalidRequestError(f"{where} must be a ChatMessage or a mapping, not {type(message).__name__}.")
    try:
        return ChatMessage.model_validate(message)
    except ValidationError as error:
        raise InvalidRequestError(validation_message(where, error)) from None


def with_system_prompt(messages: Sequence[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    """``messages``, led by ``system_prompt`` unless the conversation brings a system message of its own."""
    if not system_prompt or any(_role(message) == "system" for message in messages):
        return list(messages)
    return [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt), *messages]


def to_message_dicts(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """Translate a conversation into OpenAI-style dicts.

    System messages that follow each other become one, since many chat templates allow only one and LlamaIndex
    puts an LLM's ``system_prompt`` in front of a prompt template's own.

    Args:
        messages: The conversation, oldest message first.

    Returns:
        One dict per message with ``role`` and ``content`` (text), and ``name``, ``tool_calls`` or
        ``tool_call_id`` where the message has them. Thinking becomes ``reasoning_content``, for the chat
        template to use or drop. Cache points are left out: prefixes are cached without being marked.

    Raises:
        InvalidRequestError: A message holds a block that a text model cannot read.
    """
    dicts: list[dict[str, Any]] = []
    for message in messages:
        current = _to_dict(message)
        if dicts and current["role"] == "system" == dicts[-1]["role"]:
            dicts[-1]["content"] += "\n\n" + current["content"]
        else:
            dicts.append(current)
    return dicts


def _role(message: ChatMessage) -> str:
    return _ROLES[message.role]


def _to_dict(message: ChatMessage) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    tool_calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.content or "")
        elif isinstance(block, ToolCallBlock):
            tool_calls.append(_tool_call(block))
        elif not isinstance(block, CachePoint):
            raise InvalidRequestError(
                f"A {message.role.value} message holds a {type(block).__name__}, and the model reads text only. "
                "Put the content into a TextBlock."
            )
    carried = {key: message.additional_kwargs[key] for key in _CARRIED if key in message.additional_kwargs}
    if tool_calls:
        carried["tool_calls"] = tool_calls
    if thoughts:
        carried["reasoning_content"] = "\n".join(thoughts)
    return {"role": _role(message), "content": "\n".join(texts), **carried}


def _tool_call(block: ToolCallBlock) -> dict[str, Any]:
    arguments = block.tool_kwargs
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": block.tool_name, "arguments": arguments}
    return {"id": block.tool_call_id or "", "type": "function", "function": function}

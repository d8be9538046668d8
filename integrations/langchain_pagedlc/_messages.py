"""LangChain messages to the role/content dicts that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_pagedlc._answers import translate_answer
from langchain_pagedlc._blocks import block_kind, block_text, block_value
from pagedlc import InvalidRequestError

__all__ = ["to_chat_messages"]

#: LangChain's names of the roles, as people write them in ``ChatMessage``.
_ROLE_NAMES: Final = {"human": "user", "ai": "assistant"}


def to_chat_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Translate a conversation.

    Args:
        messages: At least one message.

    Returns:
        A dict per message, and one more for each result of a tool that stands inside a message as in Anthropic's API:
        ``role``, ``content`` and, where the message has them, ``name``, ``tool_calls``, ``tool_call_id``, ``status``
        and ``reasoning_content``, as in OpenAI's API.

    Raises:
        InvalidRequestError: No message, a message without a role in a conversation, content that is not text, or a
            block that lacks what its kind must have.
    """
    if not messages:
        raise InvalidRequestError("The conversation is empty: give at least one message.")
    return [translated for message in messages for translated in _translate(message)]


def _translate(message: BaseMessage) -> list[dict[str, Any]]:
    blocks = [] if isinstance(message.content, str) else message.content
    results = [block for block in blocks if isinstance(block, dict) and block_kind(block) == "tool_result"]
    if results and isinstance(message, HumanMessage):
        rest = [block for block in blocks if block not in results]
        own = [_translate_one(HumanMessage(rest, name=message.name))] if rest else []
        return [*(_result(block, message) for block in results), *own]
    return [_translate_one(message)]


def _translate_one(message: BaseMessage) -> dict[str, Any]:
    if isinstance(message, AIMessage):
        translated = translate_answer(message)
    else:
        translated = {"role": _role(message), "content": _content(message.content, message)}
    if isinstance(message, ToolMessage):
        translated["tool_call_id"] = message.tool_call_id
        if message.status == "error":
            translated["status"] = "error"
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


def _content(content: Any, message: BaseMessage) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    # LangChain sees to the content of messages, and not to that of the results in them.
    if isinstance(content, list) and all(isinstance(block, str | dict) for block in content):
        return [{"type": "text", "text": block_text(block, message)} for block in content]
    raise InvalidRequestError(
        f"Content in a {type(message).__name__} must be a text or a list of blocks, not {content!r:.80}."
    )


def _result(block: dict[str, Any], message: BaseMessage) -> dict[str, Any]:
    translated = {
        "role": "tool",
        "content": _content(block.get("content") or "", message),
        "tool_call_id": block_value(block, "tool_use_id", message),
    }
    return {**translated, "status": "error"} if block.get("is_error") else translated

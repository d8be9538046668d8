"""OpenAI-style chat messages, checked and brought to the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from typing_extensions import TypeIs

from pagedlc_engine.errors import InvalidRequestError

__all__ = ["ROLES", "Messages", "conversations", "is_conversation", "normalize_messages"]

#: One conversation: OpenAI-style messages.
Messages: TypeAlias = Sequence[Mapping[str, Any]]

#: The roles that normalised messages have; a chat template may know others.
ROLES = ("system", "user", "assistant", "tool")

_ROLES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")


def is_conversation(given: object) -> TypeIs[Messages]:
    """Whether it is a list that begins with a message."""
    return isinstance(given, Sequence) and not isinstance(given, str) and isinstance(next(iter(given), None), Mapping)


def conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or several, as a list."""
    if isinstance(messages, Sequence) and messages and all(map(_is_list, messages)):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def _is_list(item: object) -> bool:
    """Whether it can be a conversation; a pair of texts is what others take for a message."""
    return isinstance(item, Sequence) and not any(isinstance(part, str) for part in item)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with plain text as content and parsed tool-call arguments.

    Args:
        messages: Each with ``role`` (``developer`` is read as ``system``, ``function`` as ``tool``), ``content``
            (text, a list of text parts, or nothing beside tool calls), and optionally ``name``, ``tool_call_id`` and
            ``tool_calls`` whose arguments are JSON text or a mapping. Text parts are joined by line breaks; thinking
            parts become ``reasoning_content``. Other keys are handed to the template as they are.

    Raises:
        InvalidRequestError: No messages, or one that is malformed or holds something that is not text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            "messages must be a list of mappings like {'role': 'user', 'content': 'Hello'}, "
            f"not {type(messages).__name__}."
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message.")
    return [_normalize(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be a mapping with 'role' and 'content', not {type(message).__name__}.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where} needs a 'role', such as 'user' (got {role!r}).")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = _ROLES.get(role, role)
    text, reasoning = _content(message.get("content"), where)
    if text is None:
        if not message.get("tool_calls"):
            raise InvalidRequestError(f"{where} has no content.")
        text = ""
    normal["content"] = text
    if reasoning:
        normal.setdefault("reasoning_content", reasoning)
    if message.get("tool_calls"):
        normal["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    else:
        normal.pop("tool_calls", None)
    return normal


def _content(content: Any, where: str) -> tuple[str | None, str]:
    """Text and reasoning of a message's content; the text is ``None`` where there is no content at all."""
    if content is None or isinstance(content, str):
        return content, ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(f"{where}: content must be text or a list of parts, not {type(content).__name__}.")
    texts, reasonings = [], []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXT_PARTS:
            texts.append(part if isinstance(part, str) else _part_text(part, "text", where))
        elif kind in _REASONING_PARTS:
            reasonings.append(_part_text(part, kind, where))
        else:
            name = repr(kind) if kind else type(part).__name__
            raise InvalidRequestError(f"{where}: content part {name} is not supported; only text can be read.")
    return "\n".join(texts), "\n".join(reasonings)


def _part_text(part: Mapping[str, Any], key: str, where: str) -> str:
    text = part.get(key, part.get("text"))
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}: a content part of type {part['type']!r} has no text under {key!r}.")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence):
        raise InvalidRequestError(f"{where} must be a list, not {type(calls).__name__}.")
    return [_tool_call(call, f"{where}[{position}]") for position, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must look like {{'function': {{'name': ..., 'arguments': ...}}}}.")
    arguments = _arguments(function.get("arguments"), where)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Arguments as a mapping: templates write them out as JSON themselves, and text would be quoted twice."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if arguments is None or arguments == "":
        return {}
    try:
        value = json.loads(arguments)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{where}: the arguments are not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where}: the arguments must be a JSON object, not {type(value).__name__}.")
    return value

"""Calls and results in the history of a conversation, brought in order for chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["link_results", "one_call_per_message"]


def link_results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies in which every call has an id and every result its tool's name; failures say so in their text.

    Args:
        messages: Normalised messages. A ``tool`` message may have ``status="error"`` and may lack ``name``.
    """
    names: dict[str, str] = {}
    linked: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": call.get("id") or f"call_{position}_{n}"} for n, call in enumerate(calls)]
            names.update({call["id"]: call["function"]["name"] for call in calls})
            linked.append({**message, "tool_calls": calls})
        elif message["role"] == "tool":
            linked.append(_result(message, names))
        else:
            linked.append(dict(message))
    return linked


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    result = dict(message)
    name = result.get("name") or names.get(result.get("tool_call_id", ""))
    if name:
        result["name"] = name
    if result.pop("status", None) == "error" and not result["content"].lower().startswith("error"):
        result["content"] = f"Error: {result['content']}".rstrip()
    return result


def one_call_per_message(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies in which a message with several calls has become several, each followed by its own result."""
    rest = [dict(message) for message in messages]
    single: list[dict[str, Any]] = []
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            single.append(message)
            continue
        count = next((n for n, later in enumerate(rest) if later["role"] != "tool"), len(rest))
        results, rest = rest[:count], rest[count:]
        for number, call in enumerate(calls):
            single.append({**message, "content": message["content"] if number == 0 else "", "tool_calls": [call]})
            single += [result for result in results if result.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        single += [result for result in results if result.get("tool_call_id") not in ids]
    return single

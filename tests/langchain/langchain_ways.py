"""The four ways of asking a LangChain model, and what must hold of each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import Runnable

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def call_text(name: str, /, **arguments: Any) -> str:
    """A tool call as a model without a format of its own writes it."""
    return CALL.format(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def whole(chunks: Sequence[AIMessageChunk]) -> AIMessageChunk:
    """What the chunks of a stream add up to."""
    assert chunks
    return sum(chunks[1:], chunks[0])


async def all_ways(model: Runnable[Any, AIMessage], question: Any, **options: Any) -> list[AIMessage]:
    """``invoke``, ``ainvoke``, and the sums of ``stream`` and ``astream``."""
    return [
        model.invoke(question, **options),
        await model.ainvoke(question, **options),
        whole(list(model.stream(question, **options))),  # type: ignore[arg-type]
        whole([chunk async for chunk in model.astream(question, **options)]),  # type: ignore[misc]
    ]


def essence(answer: AIMessage) -> dict[str, Any]:
    """What does not differ from one answer to the same question to another."""
    calls = [(call["name"], call["args"]) for call in answer.tool_calls]
    # Where chunks were added up, the text of a call that was cut off ends with a bracket that closes nothing.
    invalid = [(call["name"], (call["args"] or "").rstrip('"]}')) for call in answer.invalid_tool_calls]
    usage = answer.usage_metadata or {}
    return {
        "text": answer.text,
        "calls": calls,
        "invalid": invalid,
        "thoughts": answer.additional_kwargs.get("reasoning_content"),
        "finish_reason": answer.response_metadata["finish_reason"],
        "output_tokens": usage.get("output_tokens"),
    }


def check_call_chunks(chunks: Sequence[AIMessageChunk], names: Sequence[str]) -> list[str]:
    """Id and name of each call come once and first, and each call has its index; returns their arguments."""
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [piece["name"] for piece in pieces if piece["name"] is not None] == list(names)
    ids = [piece["id"] for piece in pieces if piece["id"] is not None]
    assert len(ids) == len(set(ids)) == len(names)
    arguments = []
    for index, name in enumerate(names):
        first, *others = [piece for piece in pieces if piece["index"] == index]
        assert first["name"] == name
        assert first["id"] is not None
        assert all(piece["name"] is None and piece["id"] is None for piece in others)
        arguments.append("".join(piece["args"] or "" for piece in (first, *others)))
    assert {piece["index"] for piece in pieces} == set(range(len(names)))
    return arguments

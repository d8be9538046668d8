"""For templates that know no tools: the tools stand in the system prompt, calls and results are plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedlc.tools.formats.base import RenderInput, dump_json
from pagedlc.tools.formats.hermes import HermesFormat
from pagedlc.tools.spec import ToolSpec

__all__ = ["GenericFormat"]

_NO_SYSTEM_PROMPT = "You are a helpful assistant."
_REFUSES_SYSTEM = "system role not supported"


class GenericFormat(HermesFormat):
    """Calls as in :class:`HermesFormat`, between messages with nothing but a role and text.

    The description of the tools depends on nothing but the tools, and follows the system prompt: conversations with
    the same system prompt and tools share their beginning, and with it the prefix cache.

    Models that were not taught to call tools tend to go on and on once they have begun: one call per answer, unless
    several are asked for.

    Args:
        system_role: Whether the template takes a system message; without, the tools stand before the first question.
    """

    name = "generic"
    parallel = False

    def __init__(self, system_role: bool = True) -> None:
        self._system_role = system_role

    def matches(self, template: str) -> bool:
        """See :meth:`ToolCallFormat.matches`. Every template that takes messages will do."""
        return True

    def for_template(self, template: str) -> GenericFormat:
        """See :meth:`ToolCallFormat.for_template`."""
        return GenericFormat("system" in template and _REFUSES_SYSTEM not in template.lower())

    def prepare(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec]) -> RenderInput:
        """See :meth:`ToolCallFormat.prepare`."""
        plain = self.prepare_plain(messages).messages
        text = _describe(tools)
        first = plain[0]
        if first["role"] == "system":
            plain[0] = {**first, "content": f"{first['content']}\n\n{text}".lstrip()}
        elif self._system_role:
            plain.insert(0, {"role": "system", "content": f"{_NO_SYSTEM_PROMPT}\n\n{text}"})
        else:
            position = next((n for n, message in enumerate(plain) if message["role"] == "user"), None)
            if position is None:
                plain.insert(0, {"role": "user", "content": text})
            else:
                plain[position] = {**plain[position], "content": f"{text}\n\n{plain[position]['content']}"}
        return RenderInput(plain, None)

    def prepare_plain(self, messages: Sequence[Mapping[str, Any]]) -> RenderInput:
        """See :meth:`ToolCallFormat.prepare_plain`."""
        plain: list[dict[str, Any]] = []
        after_result = False
        for message in messages:
            written = _write(message)
            # Many templates want question and answer in turns: results of parallel calls make one message, and a
            # question that comes right after results belongs to it.
            if after_result and written["role"] == "user":
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{written['content']}"}
            else:
                plain.append(written)
            after_result = message["role"] == "tool" or (after_result and message["role"] == "user")
        return RenderInput(plain, None)


def _describe(tools: Sequence[ToolSpec]) -> str:
    lines = [dump_json(tool.to_openai()["function"]) for tool in tools]
    return "\n".join(
        [
            "You can call these tools:",
            *lines,
            "To call a tool, write:",
            "<tool_call>",
            '{"name": "the tool\'s name", "arguments": {...}}',
            "</tool_call>",
            "The result comes back between <tool_response> and </tool_response>. Use it to answer.",
        ]
    )


def _write(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        parts = [message["content"]] if message["content"] else []
        parts += [_write_call(call["function"]) for call in calls]
        return {"role": message["role"], "content": "\n".join(parts)}
    return dict(message)


def _write_call(function: Mapping[str, Any]) -> str:
    body = f'{{"name": {dump_json(function["name"])}, "arguments": {dump_json(function["arguments"])}}}'
    return f"<tool_call>\n{body}\n</tool_call>"

"""Mistral: ``[TOOL_CALLS]`` before a list of calls, or, in newer models, before the name of each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pagedlc.tools.formats.base import RenderInput, ToolCallFormat
from pagedlc.tools.grammar import CallGrammar, CallRule
from pagedlc.tools.parser import CallSyntax
from pagedlc.tools.spec import ToolChoice, ToolSpec

__all__ = ["MistralFormat"]

_OPEN = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"
#: The templates take no other ids.
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralFormat(ToolCallFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]NAME[ARGS]{...}``; both are read.

    Args:
        style: How the template writes calls: a list, a list after a space, or name and arguments.
    """

    name = "mistral"
    syntax = CallSyntax(openers=(_OPEN,), name_marker=_ARGUMENTS)

    def __init__(self, style: Literal["list", "spaced list", "named"] = "list") -> None:
        self._style = style

    @property
    def markers(self) -> tuple[str, ...]:
        """See :attr:`ToolCallFormat.markers`."""
        return (_OPEN, _ARGUMENTS, _ID)

    def matches(self, template: str) -> bool:
        """See :meth:`ToolCallFormat.matches`."""
        return _OPEN in template

    def for_template(self, template: str) -> MistralFormat:
        """See :meth:`ToolCallFormat.for_template`."""
        if _ARGUMENTS in template:
            return MistralFormat("named")
        return MistralFormat("spaced list" if f"{_OPEN} [" in template else "list")

    def prepare(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec]) -> RenderInput:
        """See :meth:`ToolCallFormat.prepare`."""
        return RenderInput([_with_short_ids(message) for message in messages], [tool.to_openai() for tool in tools])

    def grammar(self, choice: ToolChoice, parallel: bool) -> CallGrammar:
        """See :meth:`ToolCallFormat.grammar`."""
        if self._style == "named":
            rules = tuple(
                CallRule(tool.name, f"{tool.name}{_ARGUMENTS}", tool.arguments_schema(), "") for tool in choice.tools
            )
            opening, separator, closing = _OPEN, _OPEN, ""
        else:
            rules = self._object_rules(choice.tools, "arguments")
            opening, separator, closing = f"{_OPEN} [" if self._style == "spaced list" else f"{_OPEN}[", ", ", "]"
        return CallGrammar(
            rules=rules,
            opening=opening,
            separator=separator,
            closing=closing,
            trigger=_OPEN,
            required=choice.mode == "required",
            parallel=parallel,
        )


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    short = dict(message)
    if "tool_calls" in short:
        short["tool_calls"] = [{**call, "id": _short_id(str(call.get("id", "")))} for call in short["tool_calls"]]
    if "tool_call_id" in short:
        short["tool_call_id"] = _short_id(str(short["tool_call_id"]))
    return short


def _short_id(call_id: str) -> str:
    """Nine letters and digits, always the same for the same id."""
    return call_id if _MISTRAL_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]

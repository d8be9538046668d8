"""Hermes, Qwen and many others: ``<tool_call>`` and ``</tool_call>`` around a JSON object."""

from __future__ import annotations

from pagedlc.tools.formats.base import ToolCallFormat
from pagedlc.tools.grammar import CallGrammar
from pagedlc.tools.parser import CallSyntax
from pagedlc.tools.spec import ToolChoice

__all__ = ["HermesFormat"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
#: Signs of templates that use the same tags around something that is not a JSON object.
_OTHER_BODIES = ("<function=", "<arg_key>", "<parameter=")


class HermesFormat(ToolCallFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one pair of tags per call."""

    name = "hermes"
    syntax = CallSyntax(openers=(_OPEN,), closer=_CLOSE)

    def matches(self, template: str) -> bool:
        """See :meth:`ToolCallFormat.matches`."""
        return "tools" in template and _OPEN in template and not any(sign in template for sign in _OTHER_BODIES)

    def grammar(self, choice: ToolChoice, parallel: bool) -> CallGrammar:
        """See :meth:`ToolCallFormat.grammar`."""
        return CallGrammar(
            rules=self._object_rules(choice.tools, "arguments"),
            opening=f"{_OPEN}\n",
            separator=f"\n{_CLOSE}\n{_OPEN}\n",
            closing=f"\n{_CLOSE}",
            trigger=_OPEN,
            required=choice.mode == "required",
            parallel=parallel,
        )

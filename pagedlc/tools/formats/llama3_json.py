"""Llama 3.x: the answer is a JSON object with ``name`` and ``parameters``, perhaps after ``<|python_tag|>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedlc.tools.formats.base import RenderInput, ToolCallFormat
from pagedlc.tools.grammar import CallGrammar
from pagedlc.tools.history import one_call_per_message
from pagedlc.tools.parser import CallSyntax
from pagedlc.tools.spec import ToolChoice, ToolSpec

__all__ = ["Llama3JsonFormat"]

_PYTHON_TAG = "<|python_tag|>"


class Llama3JsonFormat(ToolCallFormat):
    """``{"name": ..., "parameters": {...}}``; one call per answer, unless several are asked for."""

    name = "llama3_json"
    syntax = CallSyntax(openers=(_PYTHON_TAG,), bare_objects=True, separator=";")
    parallel = False

    def matches(self, template: str) -> bool:
        """See :meth:`ToolCallFormat.matches`."""
        return "tools" in template and (_PYTHON_TAG in template or ("ipython" in template and "parameters" in template))

    def prepare(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec]) -> RenderInput:
        """See :meth:`ToolCallFormat.prepare`. The templates take no message with several calls."""
        return RenderInput(one_call_per_message(messages), [tool.to_openai() for tool in tools])

    def grammar(self, choice: ToolChoice, parallel: bool) -> CallGrammar:
        """See :meth:`ToolCallFormat.grammar`."""
        return CallGrammar(
            rules=self._object_rules(choice.tools, "parameters"),
            opening="",
            separator="; ",
            closing="",
            trigger='{"name": "',
            required=choice.mode == "required",
            parallel=parallel,
        )

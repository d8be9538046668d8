"""What a tool-call format is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedlc.tools.grammar import CallGrammar, CallRule
from pagedlc.tools.parser import CallParser, CallSyntax, ToolCallParser
from pagedlc.tools.spec import ToolChoice, ToolSpec

__all__ = ["RenderInput", "ToolCallFormat", "dump_json"]


@dataclass(frozen=True, slots=True)
class RenderInput:
    """What goes to the chat template: messages, and tools if it is the template that describes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class ToolCallFormat(ABC):
    """One way of telling a model about tools and of reading its calls. Immutable.

    A format says how it is recognised (:meth:`matches`), how a conversation is written (:meth:`prepare`), how calls
    are read (:attr:`syntax`) and how they are enforced (:meth:`grammar`).

    Attributes:
        name: As in ``tool_call_format="..."``.
        syntax: How calls are written.
        parallel: Whether an answer may have several calls when the caller does not say.
    """

    name: str
    syntax: CallSyntax
    parallel: bool = True

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Whether a chat template, given as Jinja text, teaches this format."""

    def for_template(self, template: str) -> ToolCallFormat:
        """The variant of this format that a template teaches; most formats have but one."""
        return self

    def prepare(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec]) -> RenderInput:
        """A conversation as the chat template takes it.

        Args:
            messages: Normalised messages (:func:`pagedlc.messages.normalize_messages`), linked by
                :func:`pagedlc.tools.history.link_results`.
            tools: Not empty.
        """
        return RenderInput([dict(message) for message in messages], [tool.to_openai() for tool in tools])

    def prepare_plain(self, messages: Sequence[Mapping[str, Any]]) -> RenderInput:
        """The same for a conversation without tools, which may have calls in its history all the same."""
        return RenderInput(self.prepare(messages, ()).messages, None)

    def parser(self, names: Sequence[str]) -> CallParser:
        """A parser for one answer."""
        return ToolCallParser(self.syntax, names)

    @abstractmethod
    def grammar(self, choice: ToolChoice, parallel: bool) -> CallGrammar:
        """What answers are allowed.

        Args:
            choice: An active choice.
            parallel: More than one call is allowed.
        """

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts the parser needs to see even if they are special tokens of the model."""
        return tuple(filter(None, (*self.syntax.openers, self.syntax.closer, self.syntax.name_marker)))

    def _object_rules(self, tools: Sequence[ToolSpec], arguments_key: str) -> tuple[CallRule, ...]:
        return tuple(
            CallRule(tool.name, f'{{"name": {dump_json(tool.name)}, "{arguments_key}": ', tool.arguments_schema(), "}")
            for tool in tools
        )


def dump_json(value: Any) -> str:
    """JSON on one line as chat templates write it: other alphabets are not escaped, keys keep their order."""
    return json.dumps(value, ensure_ascii=False)

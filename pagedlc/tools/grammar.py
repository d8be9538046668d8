"""What a grammar must allow so that an answer's tool calls are always valid, said without any grammar language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pagedlc_engine.grammar import StructuredOutputsParams

__all__ = ["CallGrammar", "CallRule"]

#: A piece of a structural tag.
_Tag: TypeAlias = dict[str, Any]

#: Options of the grammar library: the separators of Python's ``json.dumps`` and of ``tojson`` in chat templates. What
#: it cannot enforce is left to the tool to check: refused, one argument would take all the other tools with it.
_ARGUMENTS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_ANY_TEXT: Final[_Tag] = {"type": "any_text"}
_BLANK: Final[_Tag] = {"type": "regex", "pattern": r"[ \n]{0,4}"}


@dataclass(frozen=True, slots=True)
class CallRule:
    """The text of one tool's call: ``begin``, arguments, ``end``.

    Args:
        tool: The tool's name.
        begin: Text up to the arguments.
        schema: JSON schema of the arguments.
        end: Text after them.
    """

    tool: str
    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """``[thoughts] [free text] opening call (separator call)* closing``, then the answer ends.

    Args:
        rules: The calls that are allowed.
        opening: Text before the first call.
        separator: Text between calls.
        closing: Text after the last.
        trigger: With what the section begins: free text is over once it is written. It is a beginning of ``opening``,
            or of ``opening`` and every rule's ``begin``.
        required: No free text: the answer is calls.
        parallel: More than one call.
        thinking_open: Reasoning comes first: the text that opens it, empty if the prompt has opened it already;
            ``None`` without reasoning. With an opening text, the model may also leave it out.
        thinking_close: The text that ends reasoning.
    """

    rules: tuple[CallRule, ...]
    opening: str
    separator: str
    closing: str
    trigger: str
    required: bool
    parallel: bool
    thinking_open: str | None = None
    thinking_close: str = ""

    def to_structured_outputs(self) -> StructuredOutputsParams:
        """The same for :class:`pagedlc.SamplingParams`.

        Arguments are JSON on one line, spaced as chat templates write it: read back from the history, a call is the
        very text that the model wrote, and is found in the prefix cache.
        """
        calls = self._section() if self.required else self._free_text()
        return StructuredOutputsParams(
            structural_tag=self._with_thoughts(calls), disable_any_whitespace=True, called="The grammar of the tools"
        )

    def _with_thoughts(self, answer: _Tag) -> _Tag:
        if self.thinking_open is None:
            return answer
        thoughts: _Tag = {"begin": self.thinking_open, "content": _ANY_TEXT, "end": self.thinking_close}
        if not self.thinking_open:
            return _sequence(_ANY_TEXT, _text(self.thinking_close), _BLANK, answer)
        tag: _Tag = {"type": "tag", **thoughts}
        # Free text could be taken for thoughts as well as for an answer: which tag comes first decides.
        before = () if self.required else (_ANY_TEXT,)
        return _either([_sequence(*before, tag, _BLANK, answer), answer])

    def _free_text(self) -> _Tag:
        """Any text; if the trigger is written, the rest of the section."""
        section: _Tag = {"begin": self.trigger, "content": self._section(len(self.trigger)), "end": ""}
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": [section],
            "stop_after_first": True,
        }

    def _section(self, written: int = 0) -> _Tag:
        """The calls with all that is around them, without the first ``written`` characters."""
        if written <= len(self.opening):
            calls: _Tag = {
                "type": "tags_with_separator",
                "tags": [self._call(rule, rule.begin) for rule in self.rules],
                "separator": self.separator,
                "at_least_one": True,
                "stop_after_first": not self.parallel,
            }
            return _sequence(_text(self.opening[written:]), calls, self._end())
        written -= len(self.opening)
        first = _either([self._call(rule, rule.begin[written:]) for rule in self.rules])
        return _sequence(first, *([self._more_calls()] if self.parallel else []), self._end())

    def _end(self) -> _Tag | None:
        closing = _text(self.closing)
        if closing is None or not self.parallel:
            return closing
        # A model that ends its line after the last call must not find itself bound to make another one.
        return {"type": "or", "elements": [closing, {"type": "const_string", "value": f"{self.closing}\n"}]}

    def _more_calls(self) -> _Tag:
        return {
            "type": "tags_with_separator",
            "tags": [self._call(rule, self.separator + rule.begin) for rule in self.rules],
            "separator": "",
            "at_least_one": False,
        }

    def _call(self, rule: CallRule, begin: str) -> _Tag:
        schema = {**rule.schema, "x-guidance": _ARGUMENTS}
        return {
            "type": "tag",
            "begin": begin,
            "content": {"type": "json_schema", "json_schema": schema, "tool": rule.tool},
            "end": rule.end,
        }


def _text(value: str) -> _Tag | None:
    return {"type": "const_string", "value": value} if value else None


def _sequence(*elements: _Tag | None) -> _Tag:
    return {"type": "sequence", "elements": [element for element in elements if element is not None]}


def _either(elements: list[_Tag]) -> _Tag:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}

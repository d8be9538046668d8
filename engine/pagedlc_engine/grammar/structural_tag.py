"""Structural tags: answers made of free text, fixed texts, JSON and tags, described as nested JSON objects.

The names of the objects and their fields are those that vLLM takes (from xgrammar): ``const_string``,
``json_schema``, ``regex``, ``grammar``, ``any_text``, ``sequence``, ``or``, ``tag``, ``triggered_tags``,
``tags_with_separator``; and the older form ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``.
A ``json_schema`` that is a tool's arguments has the tool's name as ``tool``, for messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedlc_engine.errors import InvalidRequestError
from pagedlc_engine.grammar.lark import LarkWriter

__all__ = ["tag_grammar"]


def tag_grammar(tag: Mapping[str, Any], writer: LarkWriter, to_lark: Callable[[str], str]) -> str:
    """The library's grammar for a structural tag.

    Args:
        tag: As JSON.
        writer: A fresh one.
        to_lark: Translates EBNF.

    Raises:
        InvalidRequestError: The tag is not built as it must be.
    """
    translator = _Translator(writer, to_lark)
    return writer.finish(translator.term(_modern(tag)))


def _modern(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    if "structures" in tag:
        tags = [
            {**item, "content": {"type": "json_schema", "json_schema": _field(item, "schema", dict | bool)}}
            for item in _objects(tag, "structures")
        ]
        return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    inner: Mapping[str, Any] = _field(tag, "format", Mapping) if "format" in tag else tag
    return inner


class _Translator:
    def __init__(self, writer: LarkWriter, to_lark: Callable[[str], str]) -> None:
        self._writer = writer
        self._to_lark = to_lark
        self._translations: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda item: writer.literal(_field(item, "value", str)),
            "json_schema": lambda item: writer.schema(_field(item, "json_schema", dict | bool), item.get("tool")),
            "regex": lambda item: writer.regex(_field(item, "pattern", str)),
            "grammar": lambda item: writer.grammar(to_lark(_field(item, "grammar", str))),
            "any_text": lambda _: "TEXT",
            "sequence": self._sequence,
            "or": lambda item: self._either([self.term(part) for part in _objects(item, "elements")]),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def term(self, item: Mapping[str, Any]) -> str:
        """A term for one object of the description."""
        kind = item.get("type")
        if kind not in self._translations:
            known = ", ".join(self._translations)
            raise InvalidRequestError(f"structural_tag: type {kind!r} is unknown; known are {known}.")
        return self._translations[kind](item)

    def _either(self, terms: Sequence[str]) -> str:
        return self._writer.rule(" | ".join(dict.fromkeys(terms)))

    def _through(self, text: str) -> list[str]:
        """Free text up to the first ``text``, and that text."""
        pieces = self._writer.pieces(text)
        if not pieces:
            raise InvalidRequestError("structural_tag: free text needs something after it that ends it.")
        if pieces[0].startswith("<"):
            return ["TEXT", *pieces]
        return [self._writer.rule(f"TEXT {pieces[0]}", "[lazy]"), *pieces[1:]]

    def _sequence(self, item: Mapping[str, Any]) -> str:
        elements = _objects(item, "elements")
        terms: list[str] = []
        at = 0
        while at < len(elements):
            element, following = elements[at], elements[at + 1] if at + 1 < len(elements) else None
            if element.get("type") == "any_text" and following is not None:
                terms += self._text_then(following)
                at += 2
            else:
                terms.append(self.term(element))
                at += 1
        return self._writer.rule(" ".join(terms))

    def _text_then(self, item: Mapping[str, Any]) -> list[str]:
        if item.get("type") == "const_string":
            return self._through(_field(item, "value", str))
        if item.get("type") == "tag":
            return [*self._through(_field(item, "begin", str)), self._after_begin(item)]
        raise InvalidRequestError(
            "structural_tag: any_text in a sequence must be the last element, or a const_string or a tag must follow."
        )

    def _tag(self, item: Mapping[str, Any]) -> str:
        return self._writer.rule(f"{self._writer.literal(_field(item, 'begin', str))} {self._after_begin(item)}")

    def _after_begin(self, item: Mapping[str, Any], begin: str = "") -> str:
        """What follows the beginning of a tag; ``begin`` is the part of it that has not been said yet."""
        content = _field(item, "content", Mapping)
        end = item.get("end", "")
        ends = [end] if isinstance(end, str) else list(end)
        rest = [self._writer.literal(begin)] if begin else []
        if content.get("type") == "any_text" and any(ends):
            endings = [" ".join(self._through(text)) for text in ends]
        else:
            term = self.term(content)
            endings = [f"{term} {self._writer.literal(text)}" if text else term for text in ends]
        return self._writer.rule(" | ".join(" ".join([*rest, ending]) for ending in endings))

    def _triggered_tags(self, item: Mapping[str, Any]) -> str:
        triggers = item.get("triggers")
        if not isinstance(triggers, Sequence) or isinstance(triggers, str) or not all(triggers):
            raise InvalidRequestError("structural_tag: triggers must be a list of texts, none empty.")
        tags = _objects(item, "tags")
        parts = []
        for trigger in triggers:
            mine = [tag for tag in tags if _field(tag, "begin", str).startswith(trigger)]
            if not mine:
                raise InvalidRequestError(f"structural_tag: no tag begins with the trigger {trigger!r}.")
            rests = [self._after_begin(tag, tag["begin"][len(trigger) :]) for tag in mine]
            parts.append(" ".join([*self._through(trigger), self._either(rests)]))
        for tag in tags:
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                raise InvalidRequestError(f"structural_tag: the tag {tag['begin']!r} begins with no trigger.")
        part = self._writer.rule(" | ".join(parts))
        # Text before a first tag that must come could go on for ever: such an answer begins with a tag.
        first = self._either([self._tag(tag) for tag in tags]) if item.get("at_least_one") else ""
        if item.get("stop_after_first"):
            return first or self._either([part, "TEXT"])
        return self._writer.rule(f"{first} {part}* TEXT")

    def _tags_with_separator(self, item: Mapping[str, Any]) -> str:
        tag = self._either([self._tag(part) for part in _objects(item, "tags")])
        separator = self._writer.literal(_field(item, "separator", str)) if item.get("separator") else ""
        body = tag if item.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return self._writer.rule(body if item.get("at_least_one") else f"({body})?")


def _field(item: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = item.get(name)
    if not isinstance(value, kind):
        raise InvalidRequestError(f"structural_tag: {item.get('type', 'an object')!r} needs a proper {name!r}.")
    return value


def _objects(item: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = item.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(part, Mapping) for part in value):
        raise InvalidRequestError(f"structural_tag: {item.get('type', 'an object')!r} needs a list of {name}.")
    return value

"""What an answer must look like, as the user says it."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedlc_engine.errors import InvalidRequestError

__all__ = ["KINDS", "StructuredOutputsParams"]

#: The options of which exactly one is set.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What every answer must look like. Names are vLLM's; exactly one of the first six is set.

    Values are kept as plain text, so that this can be compared, hashed and pickled.

    Args:
        json: JSON schema as a dict, JSON text, or a pydantic model (or other annotated class).
        regex: Regular expression that the whole answer matches (Rust's syntax: no look-around, no back-references).
        choice: The answer is one of these strings.
        grammar: EBNF grammar: GBNF (``root ::= ...``) or Lark (``start: ...``).
        json_object: The answer is some JSON object.
        structural_tag: Free text in which certain beginnings start a part with a format of its own, such as a tool
            call; see ``docs/structured_outputs.md``.
        disable_any_whitespace: No white space between JSON tokens. Without it, at most one space or one line break
            with indentation: enough for readable JSON, too little to go on for ever.
        whitespace_pattern: Regular expression of the white space between JSON tokens.
        disable_additional_properties: Objects whose schema lists ``properties`` and does not mention
            ``additionalProperties`` get no others.
        called: What messages call it, where it was made from something else that the caller gave.

    Raises:
        InvalidRequestError: None or several kinds are set, or one cannot be read.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = True
    called: str = ""

    def __post_init__(self) -> None:
        chosen = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json is False:
            chosen.append("json")
        if len(chosen) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; it has {' and '.join(chosen) or 'none'}."
            )
        for name, normalise in (("json", _schema), ("choice", _choice), ("structural_tag", _tag)):
            if name in chosen:
                object.__setattr__(self, name, normalise(getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequestError(f"{name} must be text that is not empty, not {value!r}.")
        for name in (chosen[0], "whitespace_pattern"):
            _check_unicode(name, getattr(self, name))

    @property
    def kind(self) -> str:
        """Which of :data:`KINDS` is set."""
        return next(name for name in KINDS if getattr(self, name))

    @property
    def subject(self) -> str:
        """What a message about it begins with."""
        return self.called or f"structured_outputs: the {self.kind}"

    @property
    def num_characters(self) -> int:
        """Length of what was given, as text."""
        value = getattr(self, self.kind)
        return sum(map(len, value)) if self.kind == "choice" else len(str(value))


def _check_unicode(name: str, value: Any) -> None:
    try:
        ("".join(value) if isinstance(value, tuple) else str(value)).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} is not valid Unicode: it holds half of a surrogate pair.") from None


def _schema(value: Any) -> str:
    schema = _json_value("json", _schema_of_class(value) if isinstance(value, type) else value)
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"A JSON schema is an object, not {type(schema).__name__}.")
    return _text("json", schema)


def _schema_of_class(value: type) -> Any:
    from pydantic import PydanticSchemaGenerationError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema

    try:
        return TypeAdapter(value).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
        raise InvalidRequestError(f"{value!r} has no JSON schema: {error}") from None


def _tag(value: Any) -> str:
    tag = _json_value("structural_tag", value)
    if not isinstance(tag, dict):
        raise InvalidRequestError("structural_tag must be an object.")
    return _text("structural_tag", tag)


def _choice(value: Any) -> tuple[str, ...]:
    options = () if isinstance(value, str) or not isinstance(value, Sequence) else tuple(dict.fromkeys(value))
    if not options or not all(isinstance(option, str) and option for option in options):
        raise InvalidRequestError(f"choice must be a list of texts, none empty, not {value!r}.")
    return options


def _json_value(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return dict(value) if isinstance(value, Mapping) else value
    try:
        return jsonlib.loads(value)
    except ValueError as error:
        raise InvalidRequestError(f"{name} is not valid JSON: {error}.") from None


def _text(name: str, value: Any) -> str:
    try:
        return jsonlib.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} cannot be written as JSON: {error}.") from None

"""JSON schemas, made ready for the grammar library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagedlc_engine.grammar.spec import StructuredOutputsParams

__all__ = ["prepare_schema"]

# One space, or one line break with indentation. Without a bound, a model that is unsure writes blanks for ever.
_WHITESPACE = r"( ?|\n {0,16})"

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ONE_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_A_SCHEMA = ("items", "additionalProperties", "contains", "propertyNames")
#: Keywords that may hold schemas in any way but by name.
_PARTS = (*_ONE_OF_SCHEMAS, *_A_SCHEMA, "allOf", "not", "if", "then", "else", "unevaluatedProperties")
#: The formats of strings that the library knows.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
#: Keywords beside which an object's own list of properties is not all there is.
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "not", "if")


def prepare_schema(schema: Mapping[str, Any] | bool, spec: StructuredOutputsParams) -> dict[str, Any]:
    """The schema with the options of ``spec`` written into it.

    Args:
        schema: As JSON.
        spec: Says which white space is allowed and whether objects are closed.
    """
    whole: dict[str, Any] = {} if schema is True else {"not": {}} if schema is False else _without_annotations(schema)
    if spec.disable_additional_properties:
        whole = _close(whole, set(_combined_references(whole)), "#")
    if spec.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": spec.whitespace_pattern or _WHITESPACE}
    return {**whole, "x-guidance": {**options, **whole.get("x-guidance", {})}}


def _without_annotations(schema: Any) -> Any:
    """Without formats that the library does not know, and would refuse, and without values that need not be JSON: a
    default may be infinite."""
    if isinstance(schema, list):
        return [_without_annotations(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _OF_SCHEMAS and isinstance(value, Mapping):
            kept[keyword] = {name: _without_annotations(part) for name, part in value.items()}
        elif keyword in _PARTS:
            kept[keyword] = _without_annotations(value)
        elif keyword not in ("default", "examples") and not (keyword == "format" and value not in _FORMATS):
            kept[keyword] = value
    return kept


def _close(schema: Any, left_open: set[str], path: str) -> Any:
    """Forbid undeclared properties, but not in parts that a combination with others may complete."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for keyword in _OF_SCHEMAS:
        if isinstance(schema.get(keyword), Mapping):
            closed[keyword] = {
                name: _close(part, left_open, f"{path}/{keyword}/{name}") for name, part in schema[keyword].items()
            }
    for keyword in _ONE_OF_SCHEMAS:
        parts = schema.get(keyword)
        if isinstance(parts, list) and "properties" not in schema:
            closed[keyword] = [_close(part, left_open, f"{path}/{keyword}/{n}") for n, part in enumerate(parts)]
    for keyword in _A_SCHEMA:
        if keyword in schema:
            closed[keyword] = _close(schema[keyword], left_open, f"{path}/{keyword}")
    listed = isinstance(schema.get("properties"), Mapping) and path not in left_open
    if listed and not any(keyword in schema for keyword in (*_COMBINING, "additionalProperties")):
        closed["additionalProperties"] = False
    return closed


def _combined_references(schema: Any, combined: bool = False) -> Iterator[str]:
    """``$ref`` targets that are combined with something else, which may add properties of its own."""
    if isinstance(schema, list):
        for part in schema:
            yield from _combined_references(part, combined)
    if not isinstance(schema, Mapping):
        return
    together = combined or "allOf" in schema or ("properties" in schema and any(key in schema for key in _COMBINING))
    if isinstance(schema.get("$ref"), str) and together:
        yield schema["$ref"]
    for keyword, part in schema.items():
        yield from _combined_references(part, together and keyword in ("allOf", "anyOf", "oneOf", "if", "then", "else"))

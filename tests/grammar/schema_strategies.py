"""Random JSON schemas of the kind that tools and extraction use, all of them satisfiable."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

names = st.sampled_from(["a", "name", "größe", "x y", 'quo"te', "日付", "$id", "back\\slash"])
scalars = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), st.text(max_size=6))


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["free", "bounded", "pattern", "format"]))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(["^[a-z]{2,4}$", "^é+[0-9]$", '^"x{1,3}"$']))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(["date", "ipv4", "uuid"]))}
    if kind == "bounded":
        least = draw(st.integers(0, 4))
        return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 4))}
    return {"type": "string"}


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["integer", "number"]))
    schema: Schema = {"type": kind}
    low = draw(st.integers(-120, 120))
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = low + draw(st.integers(3, 300))
    if kind == "integer" and "minimum" not in str(schema).lower() and draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from([2, 3, 10]))
        schema.pop("maximum", None)
        schema.pop("exclusiveMaximum", None)
    return schema


def leaves() -> st.SearchStrategy[Schema]:
    return st.one_of(
        strings(),
        numbers(),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
        st.builds(lambda value: {"const": value}, scalars),
        st.builds(lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=4)),
    )


@st.composite
def objects(draw: st.DrawFn, children: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(names, children, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.one_of(st.booleans(), children))
    return schema


@st.composite
def arrays(draw: st.DrawFn, children: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "array", "items": draw(children)}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(children, min_size=1, max_size=2))
    least = draw(st.integers(0, 2))
    return {**schema, "minItems": least, "maxItems": least + draw(st.integers(0, 3))}


def _with_recursion(schema: Schema) -> Schema:
    tree = {
        "type": "object",
        "properties": {"value": schema, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
        "required": ["value", "next"],
    }
    return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}


def schemas() -> st.SearchStrategy[Schema]:
    """A schema of a few levels."""
    nested = st.recursive(
        leaves(),
        lambda children: st.one_of(
            objects(children),
            arrays(children),
            st.builds(lambda parts: {"anyOf": parts}, st.lists(children, min_size=1, max_size=3)),
        ),
        max_leaves=6,
    )
    return st.one_of(nested, nested, nested, st.builds(_with_recursion, leaves()))

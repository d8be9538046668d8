"""What a caller passes as tools and tool_choice is understood, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from tool_samples import ADD, NOW, TOOLS, WEATHER

from pagedlc.tools import ToolSpec, resolve_choice, tool_specs
from pagedlc_engine.errors import InvalidRequestError


def test_tools_keep_their_order_and_their_schema() -> None:
    specs = tool_specs(TOOLS)
    assert [spec.name for spec in specs] == ["get_weather", "add", "now"]
    assert specs[0].to_openai() == WEATHER
    assert list(specs[1].parameters["properties"]) == ["b", "a"]


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    (spec,) = tool_specs([NOW])
    assert spec.to_openai()["function"]["parameters"] == {"type": "object", "properties": {}}
    assert spec.arguments_schema() == {"type": "object", "properties": {}, "additionalProperties": False}


def test_undeclared_arguments_are_allowed_only_where_the_schema_says_so() -> None:
    open_ended: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
    assert ToolSpec("x", parameters=open_ended).arguments_schema() == open_ended
    composed = {"type": "object", "allOf": [{"properties": {"a": {}}}]}
    assert "additionalProperties" not in ToolSpec("x", parameters=composed).arguments_schema()


def test_the_inner_mapping_alone_and_ready_specs_are_tools_too() -> None:
    assert tool_specs([WEATHER["function"]]) == tool_specs([WEATHER]) == tool_specs(tool_specs([WEATHER]))
    assert tool_specs(None) == []


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([ADD, ADD], "Two tools are named 'add'"),
        ([{"type": "function", "function": {"name": ""}}], r"tools\[0\]: '' is no name"),
        ([{"type": "function", "function": {"name": 'a"b'}}], "is no name"),
        ([{"type": "function", "function": {"name": "two words"}}], "is no name"),
        ([{"type": "web_search"}], "only functions"),
        ([{"type": "function", "function": "add"}], "must be a mapping"),
        (["add"], r"tools\[0\] must be a mapping"),
        ("add", "must be a list"),
        ([{"name": "a", "parameters": {"type": "string"}}], "always an object"),
        ([{"name": "a", "parameters": ["x"]}], "must be a JSON schema"),
        ([{"name": "a", "description": 5}], "description must be text"),
        ([{"name": "a", "description": "\ud83d"}], "Tool 'a' is not valid Unicode"),
        ([{"name": "a", "parameters": {"properties": {"b": {"enum": ["\ud83d"]}}}}], "Tool 'a' is not valid Unicode"),
        ([{"name": "a", "parameters": {"properties": {"b": {"default": {1}}}}}], "Tool 'a' cannot be written as JSON"),
    ],
)
def test_what_is_wrong_with_a_tool_is_said(tools: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tool_specs(tools)


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ["get_weather", "add", "now"]),
        ("auto", "auto", ["get_weather", "add", "now"]),
        ("any", "required", ["get_weather", "add", "now"]),
        ("required", "required", ["get_weather", "add", "now"]),
        (True, "required", ["get_weather", "add", "now"]),
        ({"type": "any"}, "required", ["get_weather", "add", "now"]),
        ("add", "required", ["add"]),
        ({"type": "function", "function": {"name": "add"}}, "required", ["add"]),
        ({"type": "tool", "name": "add"}, "required", ["add"]),
    ],
)
def test_tool_choice_says_what_may_be_called(choice: Any, mode: str, names: list[str]) -> None:
    resolved = resolve_choice(choice, tool_specs(TOOLS))
    assert resolved.active
    assert (resolved.mode, [tool.name for tool in resolved.tools]) == (mode, names)


@pytest.mark.parametrize("choice", ["none", False, {"type": "none"}])
def test_none_allows_no_calls(choice: Any) -> None:
    assert not resolve_choice(choice, tool_specs(TOOLS)).active
    assert not resolve_choice("auto", []).active


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("fly", TOOLS, r"no tool 'fly' \(the tools: 'get_weather', 'add', 'now'\)"),
        ({"type": "function", "function": {"name": "fly"}}, TOOLS, "no tool 'fly'"),
        ("required", [], "there are no tools"),
        ("add", [], "no tool 'add'"),
        (5, TOOLS, "tool_choice must be"),
        ({"type": "function"}, TOOLS, "tool_choice must be"),
    ],
)
def test_an_impossible_choice_is_an_error(choice: Any, tools: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_choice(choice, tool_specs(tools))

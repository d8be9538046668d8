"""Tools as LangChain's users give them, and the calls of an answer as LangChain's messages hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import Any, Final, TypeAlias, TypeGuard

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel

from pagedlc import InvalidRequestError
from pagedlc.tools import ToolCall as AnswerCall
from pagedlc.tools import resolve_choice, tool_specs

__all__ = ["ToolLike", "bound_tools", "cut_off_mark", "openai_tools", "sort_calls"]

#: A function, a pydantic model or TypedDict, a tool, a Runnable, or a dict of OpenAI's or Anthropic's form or JSON
#: schema.
ToolLike: TypeAlias = Mapping[str, Any] | type | Callable[..., Any] | BaseTool | Runnable[Any, Any]

#: A dict with one of these describes a tool, and is no JSON schema.
_TOOL_KEYS: Final = {"name", "function", "toolSpec"}
_REFERENCE: Final = re.compile(r'"#/\$defs/([^"]+)"')
#: The ways of composing a schema, and of how many of its parts it takes the form.
_COMPOSED: Final = {"anyOf": all, "oneOf": all, "allOf": any}


def openai_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools in OpenAI's form.

    Args:
        tools: Whatever LangChain can read as a tool.
        strict: As in OpenAI's API: the schema forbids properties it does not list.

    Raises:
        InvalidRequestError: One cannot be read as a tool, or they are no list.
    """
    if isinstance(tools, str | Mapping | type | BaseTool) or not isinstance(tools, Iterable):
        raise InvalidRequestError(f"tools must be a list of tools, not {tools!r:.80}.")
    return [_openai_tool(tool, strict) for tool in tools]


def bound_tools(tools: Sequence[ToolLike], choice: Any, parallel: bool | None, strict: bool | None) -> dict[str, Any]:
    """The call options that ``bind_tools`` stands for; those that say nothing are left out.

    Raises:
        InvalidRequestError: A tool is none, or ``choice`` names none of them.
    """
    converted = openai_tools(tools, strict)
    # Each by itself: two tools of one name may be bound, as LangChain allows, but not be used in one call.
    resolve_choice(choice, [spec for tool in converted for spec in tool_specs([tool])])
    options = {"tools": converted, "tool_choice": choice, "parallel_tool_calls": parallel}
    return {name: value for name, value in options.items() if value is not None}


def _openai_tool(tool: ToolLike, strict: bool | None) -> dict[str, Any]:
    if isinstance(tool, Runnable) and not isinstance(tool, BaseTool):
        tool = tool.as_tool()
    try:
        if _is_recursive_model(tool):
            tool = tool.model_json_schema()
        if isinstance(tool, Mapping) and {"title", "$ref"} & tool.keys() and not _TOOL_KEYS & tool.keys():
            return convert_to_openai_tool(_schema_function(tool), strict=strict)
        return convert_to_openai_tool(tool, strict=strict)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"{tool!r} cannot be read as a tool: {error}") from error


def _is_recursive_model(tool: ToolLike) -> TypeGuard[type[BaseModel]]:
    """Whether a model refers to itself. LangChain writes references out, and lets what has no end be anything."""
    if not (isinstance(tool, type) and issubclass(tool, BaseModel)):
        return False
    parts = tool.model_json_schema().get("$defs", {})
    try:
        TopologicalSorter({name: _REFERENCE.findall(json.dumps(part)) for name, part in parts.items()}).prepare()
    except CycleError:
        return True
    return False


def _schema_function(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema as a function in OpenAI's form. LangChain would drop one that has no ``properties`` at its top.

    Raises:
        ValueError: It has no title, or is no schema of objects.
    """
    parameters = _resolved(schema, schema)
    if "title" not in parameters:
        raise ValueError("it needs a title, which becomes the tool's name.")
    if not _describes_objects(parameters, schema):
        raise ValueError(
            "the arguments of a tool are always an object, and the schema is not one of objects. Make it a property of "
            'one, or use with_structured_output(..., method="json_schema").'
        )
    function = {"name": parameters.pop("title"), "description": parameters.pop("description", "")}
    return {**function, "parameters": parameters}


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema; if it is a reference, with what that stands for: templates and LangChain look for properties."""
    reference = schema.get("$ref", "")
    target: Any = root if reference.startswith("#/") else None
    for key in reference.split("/")[1:]:
        target = target.get(key) if isinstance(target, Mapping) else None
    if not isinstance(target, Mapping):
        return dict(schema)
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}


def _describes_objects(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether what fits a schema is an object, as far as its top and what that is composed of say."""
    if "type" in schema:
        return bool(schema["type"] == "object")
    if "enum" in schema:
        return all(isinstance(value, Mapping) for value in schema["enum"])
    return all(
        how_many(_describes_objects(_resolved(part, root), root) for part in schema[key])
        for key, how_many in _COMPOSED.items()
        if key in schema
    )


def sort_calls(calls: Sequence[AnswerCall]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls that can be carried out, and those that cannot.

    A call of a tool that was not offered counts as one that can: agents answer it with the tools there are.
    """
    valid: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in calls:
        arguments = _arguments(call)
        if arguments is not None:
            valid.append(ToolCall(name=call.name, args=arguments, id=call.id, type="tool_call"))
        else:
            entry = InvalidToolCall(
                name=call.name, args=call.arguments, id=call.id, error=call.error, type="invalid_tool_call"
            )
            invalid.append(entry)
    return valid, invalid


def cut_off_mark(call: AnswerCall) -> str:
    """Text after the streamed arguments of an invalid call that keeps LangChain from completing them.

    LangChain reads the streamed arguments of a call by closing whatever is open. Of a call that was cut off it would
    make a valid one with other arguments, and an agent would carry that out. A bracket that closes nothing keeps the
    call invalid.
    """
    if _arguments(call) is not None or not _completed(call.arguments):
        return ""
    # Which of them closes nothing depends on where the text ends: inside a string, after a backslash, in a list …
    marks = map("".join, product(("", '"', '""'), "]}"))
    return next(mark for mark in marks if not _completed(call.arguments + mark))


def _arguments(call: AnswerCall) -> dict[str, Any] | None:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) and call.name else None


def _completed(arguments: str) -> bool:
    """Whether LangChain would read the text as a call's arguments."""
    try:
        return isinstance(parse_partial_json(arguments) if arguments else {}, dict)
    except ValueError:
        return False

"""Tools and the choice among them, checked and brought to one form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from pagedlc_engine.errors import InvalidRequestError

__all__ = ["ChoiceArgument", "ToolChoice", "ToolSpec", "resolve_choice", "tool_specs"]

_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
#: Keywords that bring properties from elsewhere, so that "no others" would forbid those.
_COMPOSING: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "patternProperties", "dependentSchemas")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool the model may call.

    Args:
        name: Letters, digits, ``_``, ``-``, ``.`` and ``:``; at most 128.
        description: What it does, for the model.
        parameters: JSON schema of an object.
        strict: As in OpenAI's API. The grammar holds arguments to the schema either way, as far as a grammar can.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NO_PARAMETERS))
    strict: bool | None = None

    def to_openai(self) -> dict[str, Any]:
        """The tool as chat templates expect it: OpenAI's form, keys always in the same order."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def arguments_schema(self) -> dict[str, Any]:
        """The schema that a grammar holds arguments to: no arguments but the declared ones."""
        schema = dict(self.parameters)
        if not any(key in schema for key in _COMPOSING):
            schema.setdefault("additionalProperties", False)
        return schema


def tool_specs(tools: Sequence[Mapping[str, Any] | ToolSpec] | None) -> list[ToolSpec]:
    """The tools in their order.

    Args:
        tools: OpenAI's form, ``{"type": "function", "function": {"name", "description", "parameters"}}``, or the
            inner mapping alone; ``parameters`` may be missing.

    Raises:
        InvalidRequestError: A tool is malformed or cannot be written as JSON, or two have the same name.
    """
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"tools must be a list of OpenAI-style tools, not {type(tools).__name__}.")
    specs = [
        tool if isinstance(tool, ToolSpec) else _spec(tool, f"tools[{position}]") for position, tool in enumerate(tools)
    ]
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRequestError(f"Two tools are named {twice[0]!r}: the model could not tell them apart.")
    for spec in specs:
        _check_text(spec)
    return specs


def _check_text(spec: ToolSpec) -> None:
    try:
        json.dumps(spec.to_openai(), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"Tool {spec.name!r} is not valid Unicode: its description or parameters hold half of a surrogate pair."
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"Tool {spec.name!r} cannot be written as JSON: {error}.") from None


def _spec(tool: Any, where: str) -> ToolSpec:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(f"{where} must be a mapping with a 'function', not {type(tool).__name__}.")
    if tool.get("type", "function") != "function":
        raise InvalidRequestError(f"{where} is of type {tool['type']!r}; only functions can be called.")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}: 'function' must be a mapping, not {type(function).__name__}.")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}: {name!r} is no name for a tool; use 1 to 128 letters, digits, '_', '-', '.' or ':'."
        )
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise InvalidRequestError(f"{where} ({name}): the description must be text, not {type(description).__name__}.")
    return ToolSpec(name, description, _parameters(function.get("parameters"), name), function.get("strict"))


def _parameters(parameters: Any, name: str) -> Mapping[str, Any]:
    if not parameters:
        return dict(_NO_PARAMETERS)
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(
            f"Tool {name!r}: parameters must be a JSON schema (a mapping), not {type(parameters).__name__}."
        )
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(
            f"Tool {name!r}: arguments are always an object, but parameters has type {parameters['type']!r}."
        )
    return {"type": "object", **parameters}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an answer may or must have.

    Args:
        mode: ``auto`` leaves it to the model, ``required`` demands a call, ``none`` forbids them.
        tools: The tools that may be called.
        named: The caller chose one tool by its name, and so means one call.
    """

    mode: Literal["auto", "required", "none"]
    tools: tuple[ToolSpec, ...]
    named: bool = False

    @property
    def active(self) -> bool:
        """Whether there can be calls at all."""
        return self.mode != "none" and bool(self.tools)


#: ``"auto"``, ``"required"`` (or ``"any"``, or True), ``"none"`` (or False), a tool's name, or OpenAI's
#: ``{"type": "function", "function": {"name": ...}}``.
ChoiceArgument: TypeAlias = str | bool | Mapping[str, Any] | None


def resolve_choice(choice: ChoiceArgument, tools: Sequence[ToolSpec]) -> ToolChoice:
    """What ``tool_choice`` means for these tools; ``None`` is ``auto``.

    Raises:
        InvalidRequestError: It names no tool of these, or demands a call where there are no tools.
    """
    if isinstance(choice, Mapping) and choice.get("type") in ("auto", "any", "required", "none"):
        choice = str(choice["type"])
    if choice is None or choice == "auto":
        return ToolChoice("auto", tuple(tools))
    if choice is False or choice == "none":
        return ToolChoice("none", tuple(tools))
    if choice is True or choice in ("required", "any"):
        if not tools:
            raise InvalidRequestError(f"tool_choice={choice!r} demands a tool call, but there are no tools.")
        return ToolChoice("required", tuple(tools))
    name = _chosen_name(choice)
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        known = ", ".join(repr(tool.name) for tool in tools) or "there are no tools"
        raise InvalidRequestError(f"tool_choice: there is no tool {name!r} (the tools: {known}).")
    return ToolChoice("required", chosen, named=True)


def _chosen_name(choice: Any) -> str:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise InvalidRequestError(
        "tool_choice must be 'auto', 'required', 'none', a tool's name, or "
        f"{{'type': 'function', 'function': {{'name': ...}}}}, not {choice!r}."
    )

"""Command-line options made from the fields of ``EngineConfig``: one list of options, one set of names."""

from __future__ import annotations

import inspect
import operator
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

import typer

from pagedlc_engine.config import EngineConfig

__all__ = ["with_engine_options"]

#: The word that stands for Python's ``None`` where an option's default is something else.
NONE = "none"


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a typer command one option per engine option, handed over as the keyword ``engine_options``.

    ``engine_options`` is a dict of those options that were given; the others keep the engine's defaults.
    ``model`` is left to the command, which takes names that the engine does not know.
    """
    fields = [name for name in EngineConfig.model_fields if name != "model"]

    def wrapper(**given: Any) -> None:
        options = {name: given.pop(name) for name in fields}
        chosen = {name: _value(name, value) for name, value in options.items() if value is not None}
        command(**given, engine_options=chosen)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "engine_options"]
    helps = option_help(EngineConfig)
    added = [_parameter(name, helps[name]) for name in fields]
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added]}
    wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return wrapper


def _parameter(name: str, text: str) -> inspect.Parameter:
    field = EngineConfig.model_fields[name]
    flag = "--" + name.replace("_", "-")
    # `--x/--no-x` only for plain booleans; everything is None unless given.
    declaration = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag
    option_type = _option_type(field.annotation)
    text = re.sub(r"(?<!Python )\bNone\b", NONE if NONE in str(option_type) else "Left out", text)
    if field.default is not None:
        shown = {True: "on", False: "off"}[field.default] if field.annotation is bool else field.default
        text = f"{text} [default: {shown}]"
    metavar = "A,B,..." if _is_list(field.annotation) else None
    option = typer.Option(declaration, help=text, show_default=False, metavar=metavar)
    # Not written with brackets: a type checker would read the variable as the name of a type.
    annotation = operator.getitem(cast(Any, Annotated), (option_type, option))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option_type(annotation: Any) -> Any:
    """The type on the command line: never required."""
    parts = [part for part in _members(annotation) if part is not type(None)]
    literals = [value for part in parts if typing.get_origin(part) is Literal for value in typing.get_args(part)]
    if not literals:
        return (str if _is_list(annotation) else parts[0]) | None
    return Literal[tuple(literals)] | None


def _value(name: str, given: Any) -> Any:
    """What Python gets for a value on the command line; numbers in a list are converted by the config."""
    if _is_list(EngineConfig.model_fields[name].annotation):
        return [part.strip() for part in given.split(",")]
    return None if given == NONE else given


def _is_list(annotation: Any) -> bool:
    return any(typing.get_origin(part) is tuple for part in _members(annotation))


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal or not typing.get_args(annotation):
        return (annotation,)
    return typing.get_args(annotation)


def option_help(documented: type) -> dict[str, str]:
    """The texts of the ``Args`` section of a class's docstring, by argument name, as plain text."""
    section = inspect.getdoc(documented).partition("Args:\n")[2]  # type: ignore[union-attr]
    section = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "").replace('"', "") for name, text in entries}

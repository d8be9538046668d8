"""Constructor keywords: whose they are, and a clear error for those that are nobody's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from pagedlc import ConfigError
from pagedlc.foreign import check_names, check_nested, refuse_foreign
from pagedlc.option_names import settle
from pagedlc_engine.config import EngineConfig

__all__ = ["ENGINE_OPTIONS", "arrange_options"]

#: Options of the engine itself. The model is a field of its own.
ENGINE_OPTIONS: Final = frozenset(EngineConfig.model_fields) - {"model"}


#: Fields that hold a mapping of further options.
_NESTED: Final = ("vllm_kwargs", "engine_options")


def arrange_options(
    given: Mapping[str, Any], fields: Collection[str], aliases: Mapping[str, str], model_fields: Collection[str]
) -> dict[str, Any]:
    """Sort constructor keywords into the fields of a class.

    Args:
        given: Keywords as the user wrote them.
        fields: Field names of the class; ``engine_options`` among them collects the engine's options.
        aliases: Other spellings of fields.
        model_fields: The fields that may also be written inside ``vllm_kwargs`` (tokenizer, revision …).

    Returns:
        Keywords that are all fields of the class.

    Raises:
        ConfigError: An option is unknown, given twice with different values, or has a value that cannot work here.
    """
    arranged: list[tuple[str, str, Any]] = []
    engine: list[tuple[str, str, Any]] = []
    check_names([name for name in given if name != "best_of"], {*fields, *aliases, *ENGINE_OPTIONS, *_NESTED})
    for name, value in given.items():
        if name in _NESTED:
            nested = {} if value is None else value
            check_nested(name, nested, {*model_fields, *ENGINE_OPTIONS}, {*fields, *aliases})
            for inner, inner_value in nested.items():
                written = f"{name}[{inner!r}]"
                if inner in model_fields:
                    arranged.append((inner, written, inner_value))
                elif inner in ENGINE_OPTIONS:
                    engine.append((inner, written, inner_value))
                else:
                    refuse_foreign(inner, inner_value)
        elif name in fields or name in aliases:
            arranged.append((aliases.get(name, name), name, value))
        elif name in ENGINE_OPTIONS:
            engine.append((name, name, value))
        elif name == "best_of":
            _check_best_of(value, given.get("n", 1))
        else:
            refuse_foreign(name, value)
    return {**settle(arranged), "engine_options": settle(engine)}


def _check_best_of(best_of: Any, n: Any) -> None:
    if best_of is not None and best_of != n:
        raise ConfigError(f"best_of={best_of!r} is not supported with n={n!r}: ask for the answers you want with n.")

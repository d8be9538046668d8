"""One rule for options that can be written in several ways: whoever writes two of them must mean the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagedlc_engine.errors import ConfigError

__all__ = ["same", "settle"]


def same(one: object, other: object) -> bool:
    """Whether two values of an option are equal; of arrays that cannot be said."""
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError):
        return False


def settle(given: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Options by their one name.

    Args:
        given: Of each option its name, how it was written, and its value.

    Raises:
        ConfigError: One option was written in two ways, with different values; both are named.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, written, value in given:
        first, earlier = found.setdefault(name, (written, value))
        if not same(earlier, value):
            raise ConfigError(f"{first}={earlier!r} and {written}={value!r} are the same option: leave one out.")
    return {name: value for name, (_, value) in found.items()}

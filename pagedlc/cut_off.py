"""Whether the JSON of a finished answer is whole, and what cut it off."""

from __future__ import annotations

import json

__all__ = ["is_whole_json", "stop_and_option"]


def is_whole_json(text: str, stop_reason: str | int | None) -> bool:
    """Whether an answer is all of a JSON value; a stop string may have come after its end, or within.

    Args:
        text: The answer.
        stop_reason: The stop string or token that ended it, if one did.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return False
    # Digits that something cut off look like a whole number.
    return stop_reason is None or type(value) not in (int, float)


def stop_and_option(stop_reason: str | int) -> tuple[str, str]:
    """What ended an answer, in words, and the option that asked for it."""
    what, option = ("string", "stop") if isinstance(stop_reason, str) else ("token", "stop_token_ids")
    return f"stop {what} {stop_reason!r}", option

"""Errors that only this integration raises."""

from __future__ import annotations

from typing import Self

from llama_index.core.base.llms.types import ChatResponse

from pagedlc.cut_off import stop_and_option
from pagedlc_engine.errors import PagedLCError

__all__ = ["IncompleteOutputError"]

#: So much of an answer's beginning is shown.
_SHOWN = 160


class IncompleteOutputError(PagedLCError, ValueError):
    """An object or a tool call was not written to its end: it was cut off.

    Attributes:
        text: The answer's text up to there.
        finish_reason: ``"length"``, ``"stop"`` (a stop string), ``"interrupted"`` or ``"abort"``.
    """

    text: str = ""
    finish_reason: str | None = None

    @classmethod
    def of(cls, what: str, response: ChatResponse) -> Self:
        """The error for a response that ends too early in ``what``."""
        details = response.additional_kwargs
        reason, tokens = details.get("finish_reason"), details.get("completion_tokens")
        stop = details.get("stop_reason")
        text = response.message.content or ""
        if reason == "length":
            ending = f"cut off after {tokens} tokens; raise max_new_tokens (or max_tokens in the call)"
        elif stop is not None:
            by, option = stop_and_option(stop)
            ending = f"cut off after {tokens} tokens by the {by}; leave it out of {option}"
        else:
            ending = f"ended early after {tokens} tokens (finish reason {reason!r})"
        shown = f" It begins: {text[:_SHOWN]!r}" if text else ""
        error = cls(f"The answer is incomplete: {what} was {ending}.{shown}")
        error.text, error.finish_reason = text, reason
        return error

"""Answers of a given form beside tool calls and after thoughts, as one structural tag."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pagedlc.tools.grammar import CallGrammar
from pagedlc_engine.grammar.spec import StructuredOutputsParams

__all__ = ["formed_answer"]


def formed_answer(
    form: StructuredOutputsParams, calls: CallGrammar | None, required: bool, thinking_close: str | None
) -> StructuredOutputsParams:
    """What the whole of an answer may be whose text has a form.

    Args:
        form: The form of the text.
        calls: The grammar of tool calls, if there may be any.
        required: There must be a call; the form then has no text to hold for.
        thinking_close: What ends the thoughts that the prompt has opened; ``None`` where it opens none.
    """
    only_calls = None if calls is None else replace(calls, required=True).to_structured_outputs()
    if only_calls is not None and required:
        return only_calls
    if only_calls is None and thinking_close is None:
        return form
    answer = _as_tag(form)
    if thinking_close is not None:
        closing = {"type": "const_string", "value": thinking_close}
        blank = {"type": "regex", "pattern": r"[ \n]{0,4}"}
        answer = {"type": "sequence", "elements": [{"type": "any_text"}, closing, blank, answer]}
    if only_calls is not None:
        answer = {"type": "or", "elements": [json.loads(only_calls.structural_tag), answer]}
    return StructuredOutputsParams(structural_tag=answer, disable_any_whitespace=True, called=form.subject)


def _as_tag(form: StructuredOutputsParams) -> dict[str, Any]:
    """A form as a piece of a structural tag."""
    match form.kind:
        case "json":
            return {"type": "json_schema", "json_schema": json.loads(form.json)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": form.regex}
        case "choice":
            options = [{"type": "const_string", "value": option} for option in form.choice or ()]
            return {"type": "or", "elements": options}
        case "grammar":
            return {"type": "grammar", "grammar": form.grammar}
        case _:
            tag: dict[str, Any] = json.loads(form.structural_tag)
            inner: dict[str, Any] = tag.get("format", tag)
            return inner

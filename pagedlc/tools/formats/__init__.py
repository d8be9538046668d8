"""The tool-call formats. A new one is a file here and its place in the list."""

from __future__ import annotations

from typing import Final

from pagedlc.tools.formats.base import RenderInput, ToolCallFormat
from pagedlc.tools.formats.generic import GenericFormat
from pagedlc.tools.formats.hermes import HermesFormat
from pagedlc.tools.formats.llama3_json import Llama3JsonFormat
from pagedlc.tools.formats.mistral import MistralFormat
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["FORMATS", "RenderInput", "ToolCallFormat", "choose_format"]

#: In the order in which they are tried; the last takes every template.
FORMATS: Final[tuple[ToolCallFormat, ...]] = (MistralFormat(), HermesFormat(), Llama3JsonFormat(), GenericFormat())


def choose_format(template: str, wanted: str | ToolCallFormat | None = None) -> ToolCallFormat:
    """The format a model is to be used with.

    Args:
        template: Jinja text of the model's chat template for conversations with tools.
        wanted: A format or its name, in place of the one that the template teaches.

    Raises:
        InvalidRequestError: There is no format of that name.
    """
    if isinstance(wanted, ToolCallFormat):
        return wanted
    if wanted is None:
        found = next(form for form in FORMATS if form.matches(template))
    else:
        named = {form.name: form for form in FORMATS}
        if wanted not in named:
            raise InvalidRequestError(
                f"tool_call_format: there is no format {wanted!r}; choose one of {', '.join(sorted(named))}, or leave "
                "it out to take what the chat template teaches."
            )
        found = named[wanted]
    return found.for_template(template)

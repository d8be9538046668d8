"""Content blocks of LangChain messages."""

from __future__ import annotations

from typing import Any, Final

from langchain_core.messages import BaseMessage

from pagedlc import InvalidRequestError

__all__ = ["block_kind", "block_text", "block_value"]

#: Blocks that are text, and where they have it: LangChain's text and plain-text document, OpenAI's kinds of text.
_TEXTS: Final = {
    "text": "text",
    "text-plain": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}


def block_kind(block: str | dict[str, Any]) -> str | None:
    """What a block is; a dict that has nothing but a text is text."""
    if isinstance(block, str):
        return "text"
    kind = block.get("type", "text" if "text" in block else None)
    return None if kind is None else str(kind)


def block_value(block: dict[str, Any], key: str, message: BaseMessage) -> Any:
    """What a block has under a key that its kind must have.

    Raises:
        InvalidRequestError: It has not.
    """
    if block.get(key) is not None:
        return block[key]
    raise InvalidRequestError(
        f"A block of type {block_kind(block)!r} in a {type(message).__name__} has no {key!r}, which it must have."
    )


def block_text(block: str | dict[str, Any], message: BaseMessage) -> str:
    """The text of a block.

    Raises:
        InvalidRequestError: It is not text.
    """
    if isinstance(block, str):
        return block
    kind = block_kind(block)
    text = block.get(_TEXTS.get(kind or "", ""))
    if isinstance(text, str):
        return text
    raise InvalidRequestError(
        f"Content of type {kind!r} in a {type(message).__name__} is not supported: this model reads text only."
    )

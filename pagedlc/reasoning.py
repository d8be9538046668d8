"""Reasoning models think aloud between two tags before they answer: thoughts and answer taken apart while streaming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

__all__ = ["ReasoningDelta", "ReasoningSplitter", "ReasoningTags", "TextDelta", "find_reasoning_tags"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around a model's thoughts."""

    opening: str
    closing: str


_KNOWN: Final = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


def find_reasoning_tags(template: str) -> ReasoningTags | None:
    """The tags a chat template speaks of, given as Jinja text; ``None`` for a model that does not think aloud."""
    return next((tags for tags in _KNOWN if tags.opening in template or tags.closing in template), None)


class _Place(Enum):
    BEFORE = auto()
    THOUGHTS = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Takes one answer apart.

    Thoughts come first or not at all: an opening tag later in the answer is text. Blank space beside the tags belongs
    to neither part. Thoughts that never close are thoughts to the end.

    Args:
        tags: The tags; ``None``: everything is answer.
        opened: The prompt ends with the opening tag, so the answer begins with thoughts.
    """

    def __init__(self, tags: ReasoningTags | None, opened: bool = False) -> None:
        self._tags = tags
        self._held = ""
        self._begun = False
        self._place = _Place.ANSWER if tags is None else _Place.THOUGHTS if opened else _Place.BEFORE

    def feed(self, text: str) -> list[ReasoningDelta | TextDelta]:
        """Take in more of the answer and return what is now certain."""
        if self._place is _Place.ANSWER and not self._held:
            return [TextDelta(text)] if text else []
        self._held += text
        deltas: list[ReasoningDelta | TextDelta] = []
        while self._held:
            place = self._place
            if delta := self._advance():
                deltas.append(delta)
            if self._place is place:
                break
        return deltas

    def finish(self) -> Sequence[ReasoningDelta | TextDelta]:
        """What was held back, when no more text will come."""
        rest, self._held = self._held, ""
        if self._place is _Place.THOUGHTS:
            rest = rest.rstrip()
            return [ReasoningDelta(rest)] if rest else []
        return [TextDelta(rest)] if rest and self._place is not _Place.GAP else []

    def _advance(self) -> ReasoningDelta | TextDelta | None:
        match self._place:
            case _Place.BEFORE:
                self._look_for_opening()
            case _Place.THOUGHTS:
                return self._think()
            case _Place.GAP:
                self._held = self._held.lstrip()
                if self._held:
                    self._place = _Place.ANSWER
            case _Place.ANSWER:
                text, self._held = self._held, ""
                return TextDelta(text)
        return None

    def _look_for_opening(self) -> None:
        assert self._tags is not None
        core = self._held.lstrip()
        if core.startswith(self._tags.opening):
            self._held = core[len(self._tags.opening) :]
            self._place = _Place.THOUGHTS
        elif not self._tags.opening.startswith(core):
            self._place = _Place.ANSWER

    def _think(self) -> ReasoningDelta | None:
        assert self._tags is not None
        if not self._begun:
            self._held = self._held.lstrip()
        thoughts, closing, rest = self._held.partition(self._tags.closing)
        if closing:
            self._held, self._place = rest, _Place.GAP
            thoughts = thoughts.rstrip()
        else:
            thoughts = self._certain(thoughts, self._tags.closing)
            self._held = self._held[len(thoughts) :]
        self._begun = self._begun or bool(thoughts)
        return ReasoningDelta(thoughts) if thoughts else None

    @staticmethod
    def _certain(text: str, mark: str) -> str:
        """``text`` without what may be the beginning of ``mark``, and without blank space before that."""
        for length in range(min(len(text), len(mark) - 1), 0, -1):
            if text.endswith(mark[:length]):
                text = text[:-length]
                break
        return text.rstrip()

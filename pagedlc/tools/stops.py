"""Stop strings that end an answer's text, and leave the arguments of its tool calls alone."""

from __future__ import annotations

from collections.abc import Sequence

from pagedlc.tools.parser import longest_overlap

__all__ = ["TextStops"]


class TextStops:
    """Passes text on up to the first stop string.

    Args:
        stops: The stop strings.
        include: Keep the stop string in the text.

    Attributes:
        matched: The stop string that was found.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def any(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def feed(self, text: str, active: bool = True) -> str:
        """Take in more text and return what is certain.

        Args:
            text: What follows the text before.
            active: Whether a stop string that ends in ``text`` counts; not before ``min_tokens``.
        """
        known = len(self._held)
        text = self._held + text
        found = self._first(text, known) if active else None
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        certain = len(text) - longest_overlap(text, self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, when something other than text follows, or nothing."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str, known: int) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first; of those complete together, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

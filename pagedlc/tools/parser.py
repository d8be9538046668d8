"""The streaming parser: text in, text and tool calls out, the same however the text was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol

from pagedlc.tools.call_readers import CallReader, NamedCallReader, ObjectCallReader, Progress
from pagedlc.tools.emitter import CUT_OFF_BEFORE, CallEmitter, new_call_id
from pagedlc.tools.events import TextDelta, ToolEvent

__all__ = ["CallParser", "CallSyntax", "PlainParser", "ToolCallParser", "longest_overlap"]

_BROKEN: Final = "This is not the form of a tool call."


class CallParser(Protocol):
    """Finds tool calls in an answer."""

    def feed(self, text: str) -> list[ToolEvent]:
        """Take in more of the answer and return what is now certain."""

    def finish(self, cut_off: bool = False) -> list[ToolEvent]:
        """The rest, when no more text will come; a call that is cut off ends as an invalid one.

        Args:
            cut_off: The model would have gone on.
        """


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls; what :class:`ToolCallParser` needs to know.

    A section of calls is an opener, then one call, or several in ``[`` and ``]``, or several between separators, then
    the closer. A call is a JSON object, or ``NAME``, ``name_marker`` and a JSON object.

    Args:
        openers: Texts that begin a section.
        closer: Text that ends it; models that forget it are understood.
        bare_objects: Also without an opener, an object that names a declared tool is a call.
        separator: A character between the calls of a section that has no ``[``.
        argument_keys: Names the arguments go by.
        name_marker: What separates name and arguments where the name stands before the object.
    """

    openers: tuple[str, ...] = ()
    closer: str = ""
    bare_objects: bool = False
    separator: str = ""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    name_marker: str = ""


class PlainParser:
    """For answers that can have no calls: everything is text."""

    def feed(self, text: str) -> list[ToolEvent]:
        """See :class:`CallParser`."""
        return [TextDelta(text)] if text else []

    def finish(self, cut_off: bool = False) -> list[ToolEvent]:
        """See :class:`CallParser`."""
        return []


class ToolCallParser:
    """See :class:`CallParser`. Text before, between and after calls is passed on, blank space beside calls is not.

    Args:
        syntax: How the model writes calls.
        names: The tools that may be called; a call of another one is invalid.
        make_id: Makes the ids.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str], make_id: Callable[[], str] = new_call_id) -> None:
        self._syntax = syntax
        self._emitter = CallEmitter(names, make_id)
        self._triggers = (*syntax.openers, "{") if syntax.bare_objects else syntax.openers
        # Words in which no call can begin, for most text is nothing else; it ends with no blank space.
        self._words = re.compile(rf"(?:\s*[^\s{re.escape(''.join(trigger[0] for trigger in self._triggers))}]+)+")
        self._held = ""
        self._section: _Section | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        """See :class:`CallParser`."""
        at = 0
        while at < len(text):
            if self._section is None and not self._held and (words := self._words.match(text, at)):
                self._emitter.text(words[0])
                at = words.end()
            else:
                self._feed(text[at])
                at += 1
        return self._emitter.take()

    def finish(self, cut_off: bool = False) -> list[ToolEvent]:
        """See :class:`CallParser`."""
        while self._section is not None:
            unread = self._section.finish()
            self._section = None
            for char in unread:
                self._feed(char)
        if cut_off and self._opening():
            self._emitter.start("")
            self._emitter.end(CUT_OFF_BEFORE)
        elif self._held.strip() or not self._emitter.num_calls:
            self._emitter.text(self._held)
        self._held = ""
        return self._emitter.take()

    def _opening(self) -> bool:
        """Whether so much of an opener is held that it can hardly be the beginning of anything else."""
        return any(_overlap(self._held, opener) >= max(2, len(opener) // 2) for opener in self._syntax.openers)

    def _feed(self, char: str) -> None:
        if self._section is None:
            self._feed_text(char)
            return
        unread = self._section.feed(char)
        if unread is None:
            return
        rejected = self._section.rejected
        self._section = None
        if rejected:
            self._release(rejected)
        for again in unread:
            self._feed(again)

    def _feed_text(self, char: str) -> None:
        self._held += char
        for trigger in self._triggers:
            if self._held.endswith(trigger):
                self._open(trigger)
                return
        self._release("")

    def _open(self, trigger: str) -> None:
        before = self._held[: -len(trigger)]
        words = before.rstrip()
        self._emitter.text(words)
        self._held = ""
        tentative = trigger == "{" and trigger not in self._syntax.openers
        self._section = _Section(self._syntax, self._emitter, before[len(words) :], tentative)
        if tentative:
            self._section.feed(trigger)

    def _release(self, more: str) -> None:
        """Hand out held text but for what may be the beginning of a call, and blank space before that."""
        self._held += more
        words = self._held[: len(self._held) - longest_overlap(self._held, self._triggers)].rstrip()
        self._emitter.text(words)
        self._held = self._held[len(words) :]


class _Section:
    """One section of calls. ``feed`` returns ``None`` until it is over, then the text that is no part of it."""

    def __init__(self, syntax: CallSyntax, emitter: CallEmitter, blank: str, tentative: bool) -> None:
        self._syntax = syntax
        self._emitter = emitter
        self._tentative = tentative
        self._step: Callable[[str], str | None] = self._before_call
        self._reader: CallReader | None = None
        self._raw = blank if tentative else ""
        self._held = ""
        self._in_list = False
        self.rejected = ""

    def feed(self, char: str) -> str | None:
        return self._step(char)

    def finish(self) -> str:
        """Text that turns out to be no part of the section, when no more comes."""
        if self._step == self._after_call:
            return "" if self._syntax.closer.strip().startswith(self._held.strip()) else self._held
        if self._tentative and not self._emitter.calling:
            self._emitter.text(self._raw)
        elif self._step == self._in_rubble:
            self._end_broken(self._held, _BROKEN)
        else:
            self._end_broken("", None)
        return ""

    def _before_call(self, char: str) -> str | None:
        if char.isspace():
            return None
        if char == "[" and not self._in_list:
            self._in_list = True
            return None
        if char == "]" and self._in_list:
            self._in_list, self._step = False, self._after_call
            return None
        self._reader = self._new_reader(char)
        self._step = self._in_rubble if self._reader is None else self._in_call
        return self._step(char)

    def _new_reader(self, char: str) -> CallReader | None:
        if char == "{":
            return ObjectCallReader(self._emitter, self._syntax.argument_keys, self._tentative)
        if self._syntax.name_marker and not self._in_list:
            return NamedCallReader(self._emitter, self._syntax.name_marker)
        return None

    def _in_call(self, char: str) -> str | None:
        assert self._reader is not None
        if self._tentative and not self._emitter.calling:
            self._raw += char
        progress = self._reader.feed(char)
        if progress is Progress.DONE:
            self._step, self._held = self._after_call, ""
            self._reader = None
        elif progress is Progress.BROKEN:
            if self._tentative and not self._emitter.calling:
                self.rejected = self._raw
                return ""
            self._step, self._held = self._in_rubble, ""
            return self._in_rubble(char)
        return None

    def _in_rubble(self, char: str) -> str | None:
        """After something that is no call: up to the closer, the next opener or the end of the answer."""
        self._held += char
        if self._syntax.closer and self._held.endswith(self._syntax.closer):
            self._end_broken(self._held[: -len(self._syntax.closer)], _BROKEN)
            return ""
        for opener in self._syntax.openers:
            if self._held.endswith(opener):
                self._end_broken(self._held[: -len(opener)], _BROKEN)
                return opener
        return None

    def _end_broken(self, rest: str, error: str | None) -> None:
        if self._reader is not None:
            self._reader.close(rest.rstrip(), error)
        elif rest.strip() or error is None:
            self._emitter.start("")
            self._emitter.arguments(rest.rstrip())
            self._emitter.end(error or CUT_OFF_BEFORE)
        self._reader = None

    def _after_call(self, char: str) -> str | None:
        self._held += char
        core, closer = self._held.strip(), self._syntax.closer.strip()
        syntax = self._syntax
        if closer and core == closer:
            return ""
        if not core or closer.startswith(core):
            return None
        if self._in_list and core in (",", "]"):
            self._in_list = core == ","
            self._step = self._before_call if self._in_list else self._after_call
            self._held = ""
            return None
        if syntax.separator and core == syntax.separator:
            return None
        if syntax.separator and char == "{" and core[:-1].strip() == syntax.separator:
            self._held, self._tentative, self._step = "", False, self._before_call
            return self._before_call(char)
        return self._held


def longest_overlap(text: str, marks: Collection[str]) -> int:
    """Length of the longest end of ``text`` with which one of ``marks`` begins, shorter than all of that mark."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

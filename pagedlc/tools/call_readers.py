"""Read one call, character by character, as models write it down.

The readers never look ahead and never hold back more than a name, so what they report does not depend on how the
text was cut into deltas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Protocol

from pagedlc.tools.emitter import CUT_OFF, CallEmitter

__all__ = ["CallReader", "NamedCallReader", "ObjectCallReader", "Progress"]

_SPACE: Final = " \t\r\n"
#: Keys that may come before the name in an object of which the name alone says whether it is a call.
_BEFORE_NAME: Final = frozenset({"type", "id"})


class Progress(Enum):
    """What a character did to a reader."""

    MORE = auto()
    DONE = auto()
    #: The character does not fit; it has not been taken in.
    BROKEN = auto()


class CallReader(Protocol):
    """Reads one call and reports it to an emitter."""

    def feed(self, char: str) -> Progress:
        """Take in the next character."""

    def close(self, rest: str, error: str | None = None) -> None:
        """End a call that will not become complete.

        Args:
            rest: What followed the point at which it broke.
            error: What is wrong, if not that the answer ended.
        """


class _ValueScanner:
    """Finds the end of a JSON value; whether it is valid is looked at when it is complete."""

    def __init__(self) -> None:
        self._first = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, char: str) -> Progress:
        """``BROKEN`` is the end of a number or literal: only what follows it ends it."""
        first = not self._first
        self._first = self._first or char
        if self._in_string:
            return self._feed_string(char)
        if char == '"':
            if not first and self._depth == 0:
                return Progress.BROKEN
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                return Progress.BROKEN
            self._depth -= 1
            return Progress.DONE if self._depth == 0 else Progress.MORE
        elif self._depth == 0 and (char == "," or char in _SPACE):
            return Progress.BROKEN
        return Progress.MORE

    def _feed_string(self, char: str) -> Progress:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return Progress.DONE if self._depth == 0 else Progress.MORE
        return Progress.MORE


class _Arguments:
    """The arguments of one call on their way to the emitter.

    An object is passed on as it comes. Some models write the object's text as a JSON string, or ``null`` for
    nothing: those are put right when they are complete.
    """

    def __init__(self, emitter: CallEmitter) -> None:
        self._emitter = emitter
        self._scanner = _ValueScanner()
        self._held = ""
        self._streams: bool | None = None
        self.complete = False

    @property
    def begun(self) -> bool:
        return self._streams is not None

    def feed(self, char: str) -> Progress:
        if self._streams is None:
            if char in _SPACE:
                return Progress.MORE
            self._streams = char == "{"
        progress = self._scanner.feed(char)
        if progress is not Progress.BROKEN:
            self._held += char
            if self._streams:
                self.release()
        if progress is not Progress.MORE:
            self.complete = True
        return progress

    def release(self) -> None:
        """Hand over what is known, if the call has begun."""
        if self._emitter.calling and (self._streams or self.complete):
            text, self._held = self._held, ""
            self._emitter.arguments(text if self._streams else _put_right(text))

    def flush(self, rest: str) -> None:
        """Hand over everything, as it is."""
        text, self._held = self._held, ""
        self._emitter.arguments(text + rest)


def _put_right(text: str) -> str:
    if text == "null":
        return ""
    try:
        value = json.loads(text)
        return value if isinstance(value, str) and isinstance(json.loads(value), dict) else text
    except ValueError:
        return text


class ObjectCallReader:
    """Reads ``{"name": ..., "arguments": {...}}``: keys in any order, further keys ignored.

    Args:
        emitter: Where the call goes.
        argument_keys: Names the arguments go by.
        tentative: The object is a call only if it names a declared tool; until then nothing is reported, and any
            other object is ``BROKEN`` before the call has begun.
    """

    def __init__(self, emitter: CallEmitter, argument_keys: tuple[str, ...], tentative: bool = False) -> None:
        self._emitter = emitter
        self._argument_keys = argument_keys
        self._tentative = tentative
        self._step: Callable[[str], Progress] = self._open
        self._raw = ""
        self._token = ""
        self._key = ""
        self._scanner = _ValueScanner()
        self._arguments: _Arguments | None = None
        self._named = False

    def feed(self, char: str) -> Progress:
        """See :class:`CallReader`."""
        progress = self._step(char)
        if progress is Progress.DONE:
            return self._complete()
        if progress is Progress.MORE and not self._named:
            self._raw += char
        return progress

    def close(self, rest: str, error: str | None = None) -> None:
        """See :class:`CallReader`. A call that misses only what follows its arguments counts as complete."""
        if not self._named:
            self._emitter.start("")
            self._emitter.arguments(self._raw + rest)
            self._emitter.end(error or CUT_OFF)
        elif self._arguments is not None and self._arguments.complete:
            self._emitter.end()
        else:
            (self._arguments or _Arguments(self._emitter)).flush(rest)
            self._emitter.end(error or CUT_OFF)

    def _complete(self) -> Progress:
        if self._named:
            self._emitter.end()
            return Progress.DONE
        return Progress.BROKEN

    def _open(self, char: str) -> Progress:
        return self._go_on(char, {"{": self._before_key})

    def _before_key(self, char: str) -> Progress:
        if char == "}":
            return Progress.DONE
        return self._go_on(char, {'"': self._in_key})

    def _in_key(self, char: str) -> Progress:
        if (key := self._string(char)) is not None:
            self._key = key
            self._step = self._before_colon
            if self._tentative and not self._named and key != "name" and key not in _BEFORE_NAME:
                return Progress.BROKEN
        return Progress.MORE

    def _before_colon(self, char: str) -> Progress:
        return self._go_on(char, {":": self._before_value})

    def _before_value(self, char: str) -> Progress:
        if char in _SPACE:
            return Progress.MORE
        if self._key == "name" and not self._named:
            return self._go_on(char, {'"': self._in_name})
        if self._key in self._argument_keys and self._arguments is None:
            self._arguments = _Arguments(self._emitter)
            self._step = self._in_arguments
        else:
            self._scanner = _ValueScanner()
            self._step = self._in_other
        return self._step(char)

    def _in_name(self, char: str) -> Progress:
        name = self._string(char)
        if name is None:
            return Progress.MORE
        if self._tentative and name not in self._emitter.names:
            return Progress.BROKEN
        self._named = True
        self._step = self._after_value
        self._emitter.start(name)
        if self._arguments is not None:
            self._arguments.release()
        return Progress.MORE

    def _in_arguments(self, char: str) -> Progress:
        assert self._arguments is not None
        progress = self._arguments.feed(char)
        return self._end_of_value(progress, char, self._arguments.release)

    def _in_other(self, char: str) -> Progress:
        return self._end_of_value(self._scanner.feed(char), char, None)

    def _end_of_value(self, progress: Progress, char: str, then: Callable[[], None] | None) -> Progress:
        if progress is Progress.MORE:
            return progress
        if then is not None:
            then()
        self._step = self._after_value
        return self._after_value(char) if progress is Progress.BROKEN else Progress.MORE

    def _after_value(self, char: str) -> Progress:
        if char == "}":
            return Progress.DONE
        return self._go_on(char, {",": self._before_key})

    def _go_on(self, char: str, ways: dict[str, Callable[[str], Progress]]) -> Progress:
        if char in ways:
            self._step = ways[char]
            return Progress.MORE
        return Progress.MORE if char in _SPACE else Progress.BROKEN

    def _string(self, char: str) -> str | None:
        """The string that is complete with ``char``."""
        escaped = (len(self._token) - len(self._token.rstrip("\\"))) % 2
        if char != '"' or escaped:
            self._token += char
            return None
        token, self._token = self._token, ""
        try:
            return str(json.loads(f'"{token}"', strict=False))
        except ValueError:
            return token


class NamedCallReader:
    """Reads ``NAME[ARGS]{...}``, also with an id, ``NAME[CALL_ID]ID[ARGS]{...}``, or with the marker left out.

    Args:
        emitter: Where the call goes.
        marker: What separates name and arguments.
        id_marker: What separates name and id.
    """

    def __init__(self, emitter: CallEmitter, marker: str, id_marker: str = "[CALL_ID]") -> None:
        self._emitter = emitter
        self._marker = marker
        self._id_marker = id_marker
        self._head = ""
        self._arguments: _Arguments | None = None

    def feed(self, char: str) -> Progress:
        """See :class:`CallReader`."""
        if self._arguments is not None:
            progress = self._arguments.feed(char)
            if progress is Progress.DONE:
                self._arguments.release()
                self._emitter.end()
            return progress
        if char == "\n":
            return Progress.BROKEN
        if char == "{":
            return self._begin(self._head).feed(char)
        self._head += char
        if self._head.endswith(self._marker):
            self._begin(self._head[: -len(self._marker)])
        return Progress.MORE

    def _begin(self, head: str) -> _Arguments:
        self._emitter.start(head.partition(self._id_marker)[0].strip())
        self._arguments = _Arguments(self._emitter)
        return self._arguments

    def close(self, rest: str, error: str | None = None) -> None:
        """See :class:`CallReader`."""
        if self._arguments is None:
            self._emitter.start("")
            self._emitter.arguments(self._head + rest)
        else:
            self._arguments.flush(rest)
        self._emitter.end(error or CUT_OFF)

"""Answers may end while others are looked for: the garbage collector ends streams that nobody holds, at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from pagedlc.interruption import RunningAnswers


class Name(str):
    """A name that does something when it is compared."""

    __slots__ = ("compared",)
    compared: Callable[[], None]

    def __eq__(self, other: object) -> bool:
        self.compared()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_an_answer_that_ends_while_others_are_interrupted() -> None:
    running = RunningAnswers()
    aborted: list[str] = []
    ending, name = ExitStack(), Name("a")
    name.compared = ending.close
    ending.enter_context(running.running(aborted.append, [name]))
    found: list[int] = []
    with running.running(aborted.append, ["b"]) as other:
        thread = threading.Thread(target=lambda: found.append(running.interrupt("b")), daemon=True)
        thread.start()
        thread.join(20)
        assert found == [1]
        assert aborted == [other.request_id]
    assert running.interrupt("a") == 0

"""Answers that can be cut short while they are generated, by the names under which their callers know them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

__all__ = ["RunningAnswer", "RunningAnswers"]


class RunningAnswer:
    """An answer that is being generated.

    Args:
        abort: Gives up a request by its id.

    Attributes:
        request_id: The id to give to its request.
        interrupted: Whether it has been cut short.
        started: When it began, by the monotonic clock, in seconds.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self.request_id = uuid.uuid4().hex
        self.interrupted = False
        self.started = time.monotonic()
        self._abort = abort

    def interrupt(self) -> None:
        """End the answer; what it has so far is kept. Any number of times, from any thread."""
        self.interrupted = True
        self._abort(self.request_id)


class RunningAnswers:
    """The answers that a model is generating. Safe to use from many threads."""

    def __init__(self) -> None:
        # Reentrant, and no list is changed while it is looped over: the garbage collector may end a stream, and with it
        # an answer, in the middle of any of this.
        self._lock = threading.RLock()
        self._named: list[tuple[str, RunningAnswer]] = []
        self._asked: dict[str, RunningAnswer] = {}

    @contextmanager
    def running(
        self, abort: Callable[[str], None], names: Collection[str], barge_into: str | None = None
    ) -> Iterator[RunningAnswer]:
        """An answer that can be interrupted by its names while the context lasts.

        Args:
            abort: Gives up a request by its id.
            names: Such as the ids of a run and of a conversation; several answers may share a name.
            barge_into: Interrupt the answers of this name first.
        """
        answer = RunningAnswer(abort)
        entries = [(name, answer) for name in set(names)]
        with self._lock:
            # Under one lock: of two turns that barge in at once, the second interrupts the first.
            before = self._answers(barge_into)
            self._named.extend(entries)
            self._asked[answer.request_id] = answer
        for other in before:
            other.interrupt()
        try:
            yield answer
        finally:
            with self._lock:
                for entry in entries:
                    self._named.remove(entry)
                del self._asked[answer.request_id]

    def interrupt(self, name: str) -> int:
        """End the answers of this name; returns how many there were."""
        with self._lock:
            answers = self._answers(name)
        for answer in answers:
            answer.interrupt()
        return len(answers)

    def submitted(self, request_id: str) -> None:
        """Take note that the engine has a request: if its answer was interrupted before that, it is now."""
        answer = self._asked.get(request_id)
        if answer is not None and answer.interrupted:
            answer.interrupt()

    def _answers(self, name: str | None) -> list[RunningAnswer]:
        return [answer for known, answer in list(self._named) if known == name]

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
        self._lock = threading.Lock()
        self._by_name: dict[str, list[RunningAnswer]] = {}

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
        with self._lock:
            # Under one lock: of two turns that barge in at once, the second interrupts the first.
            before = list(self._by_name.get(barge_into, ())) if barge_into is not None else []
            for name in set(names):
                self._by_name.setdefault(name, []).append(answer)
        for other in before:
            other.interrupt()
        try:
            yield answer
        finally:
            self._forget(answer, names)

    def interrupt(self, name: str) -> int:
        """End the answers of this name; returns how many there were."""
        with self._lock:
            answers = list(self._by_name.get(name, ()))
        for answer in answers:
            answer.interrupt()
        return len(answers)

    def _forget(self, answer: RunningAnswer, names: Collection[str]) -> None:
        with self._lock:
            for name in set(names):
                answers = self._by_name[name]
                answers.remove(answer)
                if not answers:
                    del self._by_name[name]

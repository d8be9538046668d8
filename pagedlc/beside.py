"""Work that takes a while, beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

__all__ = ["MAX_THREADS", "Beside"]

#: Threads that work at once; what they do is done by one core each, or is waiting for the same engine to load.
MAX_THREADS: Final = 8

_Made = TypeVar("_Made")


class Beside:
    """A few threads that last as long as there is work.

    The loop's executor would not do: all its threads may be waiting for what the loop is about to answer, as tools do
    that call a model from a thread, and it takes nothing more once the program's main thread has ended. The
    program does not end before these threads: they may be in the midst of loading an engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()

    async def run(self, make: Callable[[], _Made]) -> _Made:
        """Await ``make()``, made in one of the threads."""
        made: Future[_Made] = Future()
        context = contextvars.copy_context()
        self._add(partial(context.run, _make, make, made))
        try:
            return await asyncio.wrap_future(made)
        finally:
            del made  # its error's traceback holds this frame

    def _add(self, work: Callable[[], None]) -> None:
        with self._lock:
            # A process that was forked meanwhile has none of them.
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            self._waiting.append(work)
            if len(self._threads) < MAX_THREADS:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="pagedlc-beside")
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            if not self._threads:
                self._waiting.pop()
                raise
        else:
            self._threads.add(thread)

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads.discard(threading.current_thread())
            return None


def _make(make: Callable[[], _Made], made: Future[_Made]) -> None:
    if not made.set_running_or_notify_cancel():
        return
    try:
        result = make()
    except StopIteration as error:  # no future takes it
        made.set_exception(RuntimeError(f"StopIteration: {error}"))
    except BaseException as error:
        made.set_exception(error)
    else:
        made.set_result(result)
    finally:
        del made

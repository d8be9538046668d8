"""Work that takes a while, beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread"]

_Made = TypeVar("_Made")


async def in_thread(make: Callable[[], _Made]) -> _Made:
    """Await ``make()`` in a thread of its own.

    The loop's executor would not do: all its threads may be waiting for what the loop is about to answer, as tools do
    that call a model from a thread, and it takes nothing more once the program's main thread has ended. The
    program does not end before the thread: it may be in the midst of loading an engine.
    """
    made: Future[_Made] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_make, make, made), name="pagedlc-beside").start()
    try:
        return await asyncio.wrap_future(made)
    finally:
        del made  # its error's traceback holds this frame


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

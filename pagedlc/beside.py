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
    that call a model from a thread, and it takes nothing more once the program's main thread has ended.
    """
    made: Future[_Made] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_make, make, made), name="pagedlc-beside", daemon=True).start()
    return await asyncio.wrap_future(made)


def _make(make: Callable[[], _Made], made: Future[_Made]) -> None:
    if not made.set_running_or_notify_cancel():
        return
    try:
        result = make()
    except BaseException as error:
        made.set_exception(error)
    else:
        made.set_result(result)

"""Python's garbage collector, and the many objects that it need not look at."""

from __future__ import annotations

import gc
import weakref

__all__ = ["set_aside", "set_aside_too", "take_back"]

#: By the user's id: what takes back in its name, at the latest when it ends.
_users: dict[int, weakref.finalize[..., object]] = {}


def set_aside(user: object) -> None:
    """Collect what is garbage, and take what remains out of the collector's sight until :func:`take_back`.

    A process with torch and a framework holds some hundred thousand objects that live as long as it does. Many streams
    at once make enough new ones for a full collection every few seconds, which visits all objects there are while
    every thread stands still: the engine's, and all its readers.

    Args:
        user: Who wants it so; not kept alive. Its end is as good as :func:`take_back`.
    """
    if id(user) not in _users:
        _users[id(user)] = weakref.finalize(user, _forget, id(user))
        _users[id(user)].atexit = False
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def set_aside_too() -> None:
    """After a large import: add what it brought, if anything is set aside. Takes no time."""
    if gc.get_freeze_count():
        gc.freeze()


def take_back(user: object) -> None:
    """Let the collector see everything again, so that what was let go of meanwhile is freed; if nobody else is left
    who called :func:`set_aside`."""
    end = _users.get(id(user))
    if end is not None:
        end()


def _forget(user: int) -> None:
    _users.pop(user, None)
    if not _users:
        gc.unfreeze()

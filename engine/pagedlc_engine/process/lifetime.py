"""When the engine's process ends: with its parent, and not before the parent says so."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

__all__ = ["live_with"]

_PR_SET_PDEATHSIG = 1


def live_with(parent: int) -> None:
    """Let this process be killed when its parent ends, however that comes about, and let Ctrl-C leave it alone.

    On Linux the kernel sees to the first; elsewhere the end of the channel does.

    Args:
        parent: The process id of the parent. Its thread that started this process must live as long as the engine:
            the kernel's "parent" is that thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)

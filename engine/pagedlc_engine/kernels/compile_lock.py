"""One process at a time compiles kernels into a cache folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

__all__ = ["alone_in"]

logger = logging.getLogger(__name__)

#: A cold cache takes 10 s to fill; a process that holds the lock for longer is stuck or stopped.
PATIENCE = 120.0
_NAP = 0.05


@contextmanager
def alone_in(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Keep other processes' engines from compiling into ``folder`` meanwhile.

    It saves work: who comes second finds everything in the cache. And it avoids a mix-up: Triton replaces a cached
    library that another process has just written too, the file system gives the freed inode to the next library, and
    Python, which knows loaded libraries by their inode, then calls the old one in the new one's place.

    Args:
        folder: The cache; made if it is not there. Where it cannot be written, nothing is locked.
        patience: Seconds to wait for the others; afterwards it goes on beside them.
    """
    try:
        import fcntl  # not there on Windows

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "pagedlc.lock").open("w")
    except (ImportError, OSError) as error:
        logger.debug("Kernels are compiled without a lock on %s: %s", folder, error)
        yield
        return
    with file:
        end = time.monotonic() + patience
        while not _locked(file.fileno(), fcntl):
            if time.monotonic() >= end:
                logger.warning(
                    "Another process has been compiling into %s for %.0f s; going on beside it.", folder, patience
                )
                break
            time.sleep(_NAP)
        yield


def _locked(descriptor: int, fcntl: ModuleType) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        logger.debug("Kernels are compiled without a lock: %s", error)
    return True

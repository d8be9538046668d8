"""Leaves a process that has computed with torch able to fork; importing it is all there is to do.

GNU OpenMP keeps a pool of threads for every thread that has shared work, as torch does on a CPU. A fork copies the
forking thread's pool without the threads in it, and the child would wait for them forever. So they are ended before the
fork; the next work to share starts new ones on either side.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial

import torch

__all__: list[str] = []

#: OpenMP's ``omp_pause_soft``.
_SOFTLY = 1

# Looked up through torch, which may have brought an OpenMP library of its own.
_pause_openmp = getattr(ctypes.CDLL(torch._C.__file__), "omp_pause_resource_all", None)

if _pause_openmp is not None and hasattr(os, "register_at_fork"):
    os.register_at_fork(before=partial(_pause_openmp, _SOFTLY))

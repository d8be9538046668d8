"""The CUDA calls of a decode step, made without giving up the interpreter lock, except to wait.

torch releases the lock around each of its calls; a thread that gives it up gets it back, against other busy threads,
only after the interpreter's switch interval. Calls that take microseconds keep it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Protocol

import torch

from pagedlc_engine.errors import ConfigError, PagedLCError

__all__ = ["CudaRuntime", "Graph", "Mark", "NoWait", "StepEvent", "capture_stream"]

_NOT_READY = 600


class CudaRuntime:
    """libcudart as torch has loaded it.

    Raises:
        ConfigError: The library is not among this process's.
    """

    def __init__(self) -> None:
        path = str(_library())
        lib = ctypes.PyDLL(path)
        self.graph_instantiate = lib.cudaGraphInstantiate
        self.graph_instantiate.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_ulonglong]
        self.graph_destroy = lib.cudaGraphExecDestroy
        self.graph_destroy.argtypes = [ctypes.c_void_p]
        self.graph_launch = lib.cudaGraphLaunch
        self.graph_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.event_record = lib.cudaEventRecord
        self.event_record.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.event_query = lib.cudaEventQuery
        self.event_query.argtypes = [ctypes.c_void_p]
        # Waits on a core of its own: a nap's length is the system's to choose, and each costs a turn of the lock.
        self.event_synchronize = ctypes.CDLL(path).cudaEventSynchronize
        self.event_synchronize.argtypes = [ctypes.c_void_p]
        self._error_string = lib.cudaGetErrorString
        self._error_string.argtypes = [ctypes.c_int]
        self._error_string.restype = ctypes.c_char_p

    def check(self, code: int, what: str) -> None:
        """Raise :class:`PagedLCError` unless ``code`` is success."""
        if code != 0:
            raise PagedLCError(f"{what} failed: CUDA error {code} ({self._error_string(code).decode()}).")


def _library() -> Path:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return Path(line.split(maxsplit=5)[-1])
    raise ConfigError("The CUDA runtime library that torch uses was not found; use enforce_eager=True.")


class Graph:
    """A captured CUDA graph, ready to launch.

    Args:
        runtime: The library.
        captured: Captured with ``keep_graph=True``; its memory stays alive with this object.
    """

    def __init__(self, runtime: CudaRuntime, captured: torch.cuda.CUDAGraph) -> None:
        self._runtime = runtime
        self._captured = captured
        self._executable = ctypes.c_void_p()
        code = runtime.graph_instantiate(ctypes.byref(self._executable), ctypes.c_void_p(captured.raw_cuda_graph()), 0)
        runtime.check(code, "Making a CUDA graph")

    def launch(self, stream: ctypes.c_void_p) -> None:
        """Queue the graph."""
        code = self._runtime.graph_launch(self._executable, stream)
        if code:
            self._runtime.check(code, "Launching a CUDA graph")

    def __del__(self) -> None:
        if self._executable:
            self._runtime.graph_destroy(self._executable)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all captures on a GPU: torch's own default is of the GPU that was captured on first, and libraries
    keep memory for every stream they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Mark(Protocol):
    """A place among the steps launched so far."""

    def record(self, stream: ctypes.c_void_p) -> None:
        """Move to the present end."""
        ...

    def done(self) -> bool:
        """Whether everything before it is done, or has failed."""
        ...

    def wait(self) -> None:
        """Return when everything before it is done."""
        ...


class NoWait:
    """Where launches return when they are done: Triton's interpreter."""

    def record(self, stream: ctypes.c_void_p) -> None:
        """See :class:`Mark`."""

    def done(self) -> bool:
        """See :class:`Mark`."""
        return True

    def wait(self) -> None:
        """See :class:`Mark`."""


class StepEvent:
    """Marks a place in the stream; reused step after step."""

    def __init__(self, runtime: CudaRuntime, stream: torch.cuda.Stream) -> None:
        self._runtime = runtime
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._handle = ctypes.c_void_p(self._event.cuda_event)

    def record(self, stream: ctypes.c_void_p) -> None:
        """Move to the stream's present end."""
        code = self._runtime.event_record(self._handle, stream)
        if code:
            self._runtime.check(code, "Recording an event")

    def done(self) -> bool:
        """See :class:`Mark`."""
        return bool(self._runtime.event_query(self._handle) != _NOT_READY)

    def wait(self) -> None:
        """Return when everything before the event is done.

        Raises:
            PagedLCError: Something before it failed.
        """
        code = self._runtime.event_query(self._handle)
        if code == _NOT_READY:
            code = self._runtime.event_synchronize(self._handle)
        if code:
            self._runtime.check(code, "A step on the GPU")

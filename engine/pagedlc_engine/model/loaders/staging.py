"""From files to a GPU through a little page-locked memory: no second copy of a model in the host's memory."""

from __future__ import annotations

import threading
from io import FileIO
from pathlib import Path

import torch

from pagedlc_engine.errors import ModelLoadError

__all__ = ["Staging"]

_CHUNK = 8 << 20


class Staging:
    """Copies parts of files into tensors; any number of threads at once, each through two buffers of its own.

    While one buffer is on its way to the device, the other is filled.

    Args:
        device: Where the tensors are.
        chunk: Bytes a buffer, a multiple of 16.
    """

    def __init__(self, device: torch.device, chunk: int = _CHUNK) -> None:
        self._device = device
        self._chunk = chunk
        self._own = threading.local()

    def copy(self, file: Path, offset: int, dtype: torch.dtype, out: torch.Tensor) -> None:
        """Fill ``out`` with the numbers that begin at a place in a file; returns before the last are there.

        Args:
            file: Little-endian numbers.
            offset: In bytes.
            dtype: Type of the numbers in the file.
            out: Contiguous, of any type.

        Raises:
            ModelLoadError: The file ends before the tensor does.
        """
        flat = out.view(-1)
        step = self._chunk // dtype.itemsize
        with file.open("rb", buffering=0) as data:
            data.seek(offset)
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                buffer = self._next_buffer()
                _read(data, buffer.bytes[: part.numel() * dtype.itemsize], file)
                source = buffer.tensor[: part.numel() * dtype.itemsize].view(dtype)
                if dtype != out.dtype:  # converted where that is fast
                    source = source.to(self._device, non_blocking=True)
                part.copy_(source, non_blocking=True)
                buffer.sent()

    def _next_buffer(self) -> _Buffer:
        own = self._own
        if not hasattr(own, "buffers"):
            own.buffers = [_Buffer(self._chunk, self._device) for _ in range(2)]
        own.buffers.reverse()
        buffer: _Buffer = own.buffers[0]
        buffer.wait()
        return buffer


class _Buffer:
    """Memory to read into; page-locked for a CUDA device."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self.bytes = self.tensor.numpy().data
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def sent(self) -> None:
        """Called when the copies that read it have been queued."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return when it may be written again."""
        if self._event is not None:
            self._event.synchronize()


def _read(data: FileIO, target: memoryview, file: Path) -> None:
    done = 0
    while done < len(target):
        count = data.readinto(target[done:])
        if not count:
            raise ModelLoadError(f"{file} ended {len(target) - done:,} bytes early while it was read. Fetch it again.")
        done += count

"""The header of a GGUF file, read without touching the tensors.

Written after the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md). The ``gguf`` library's own
reader makes several objects for every vocabulary entry, which takes seconds; here long string arrays, which
the model does not need, are stepped over.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError

__all__ = ["GGUFFile", "GGUFTensor"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: Longer arrays are vocabulary (tokens, scores, merges), not model description.
_LONGEST_ARRAY = 4096
_READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: ``shape`` is outermost first, ``offset`` and ``size`` are bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GGUFFile:
    """Metadata and tensor directory of one file.

    Args:
        path: The file.
        metadata: Key to number, bool, string or list; long arrays are left out.
        tensors: Name to place.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header and check that the file holds all the tensors it announces.

        Raises:
            ModelNotFoundError: The file is not a GGUF file.
            ModelLoadError: It is damaged or truncated.
            UnsupportedModelError: Its version, byte order or a tensor's type is not supported.
        """
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelNotFoundError(f"{path} is not a model: it does not begin like a GGUF file.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    return cls(path, *_Header(path, data).read())
                except (struct.error, UnicodeDecodeError, IndexError) as error:
                    raise ModelLoadError(
                        f"{path} is truncated or damaged: its header cannot be read ({error}). Fetch it again."
                    ) from None

    def tensor(self, name: str) -> GGUFTensor:
        """The place of a tensor; :class:`ModelLoadError` names it when it is missing."""
        found = self.tensors.get(name)
        if found is None:
            raise ModelLoadError(f"{self.path}: the tensor {name} is missing.")
        return found

    def dequantized(self, name: str) -> np.ndarray:
        """A tensor's values as float32."""
        place = self.tensor(name)
        raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=place.offset, shape=(place.size,))
        if place.kind == GGMLQuantizationType.F32:
            return np.array(raw.view(np.float32).reshape(place.shape))
        if place.kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(place.shape).astype(np.float32)
        rows = raw.reshape(*place.shape[:-1], -1)
        return np.asarray(dequantize(rows, place.kind), dtype=np.float32).reshape(place.shape)


class _Header:
    """One pass over the header's bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 4

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version} (or a big-endian file) is not supported; versions 2 and 3 are."
            )
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if num_tensors + num_keys > len(self.data):
            raise ModelLoadError(f"{self.path} is damaged: its header counts {num_tensors} tensors.")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            value = self._value(self._scalar("I"))
            if value is not None:
                metadata[key] = value
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self.at // alignment) * alignment
        return metadata, {entry[0]: self._place(start, *entry) for entry in entries}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        if self.at + length > len(self.data):
            raise IndexError(f"a text of {length} bytes does not fit")
        text = self.data[self.at : self.at + length].decode("utf-8")
        self.at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise IndexError(f"value type {kind} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any] | None:
        kind, count = self._scalar("I"), self._scalar("Q")
        if count > len(self.data):
            raise IndexError(f"an array of {count} elements does not fit")
        if count <= _LONGEST_ARRAY:
            return [self._value(kind) for _ in range(count)]
        if kind in _SCALARS:
            self.at += count * struct.calcsize("<" + _SCALARS[kind])
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            raise IndexError(f"a long array of type {kind} is unknown")
        return None

    def _skip_strings(self, count: int) -> None:
        length_at, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        self.at = at

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, dims[::-1], self._scalar("I"), self._scalar("Q")

    def _place(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError:
            raise UnsupportedModelError(f"{self.path}: the tensor {name} has the unknown type {kind}.") from None
        if quantization.name not in _READABLE:
            raise UnsupportedModelError(
                f"{self.path}: the tensor {name} is of type {quantization.name}, which is not supported. "
                f"Supported: {', '.join(_READABLE)}."
            )
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block:
            raise ModelLoadError(f"{self.path}: the tensor {name} has rows that are no multiple of {block}.")
        size = math.prod(shape) // block * block_bytes
        if start + offset + size > len(self.data):
            raise ModelLoadError(
                f"{self.path} is truncated: the tensor {name} ends at byte {start + offset + size:,}, "
                f"but the file has {len(self.data):,}. Fetch it again."
            )
        return GGUFTensor(name, shape, quantization, start + offset, size)

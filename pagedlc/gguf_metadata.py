"""The key-value part of a GGUF file, read in one pass.

The ``gguf`` library's reader makes a NumPy view per string, which takes seconds for a vocabulary; the text layer
needs the vocabulary and no tensor, so this reads just the header, as the GGUF specification lays it out:
magic, version, tensor count, pair count, then pairs of (key, value type, value).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError

__all__ = ["is_gguf", "read_gguf_metadata"]

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
#: Value type to its little-endian ``struct`` letter.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_U32 = struct.Struct("<I")


def is_gguf(path: Path) -> bool:
    """Whether the file at ``path`` begins like a GGUF file."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of a GGUF file (version 2 or 3, little-endian).

    Args:
        path: The ``.gguf`` file.

    Returns:
        Key to ``int``, ``float``, ``bool``, ``str``, or a list of one of these.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelLoadError: The file is no GGUF file, or is cut off within its header.
        UnsupportedModelError: A GGUF version or byte order that cannot be read.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"There is no file {path}.")
    if not is_gguf(path):
        raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data, path).pairs()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise ModelLoadError(
                f"{path} is truncated or damaged: its GGUF header cannot be read ({error}). Download the file again."
            ) from error


class _Reader:
    """A cursor over the bytes of a GGUF header."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._offset = len(MAGIC)

    def pairs(self) -> dict[str, Any]:
        version = self._unpack(_U32)
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self._path} is a GGUF file of version {version} (or of big-endian byte order); "
                "little-endian versions 2 and 3 can be read."
            )
        self._unpack(_LENGTH)  # tensor count
        count = self._unpack(_LENGTH)
        pairs: dict[str, Any] = {}
        for _ in range(count):
            key = self._strings(1)[0]
            pairs[key] = self._value(self._unpack(_U32))
        return pairs

    def _unpack(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return value

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array()
        return self._unpack(struct.Struct("<" + _SCALARS[kind]))

    def _array(self) -> list[Any]:
        kind, count = self._unpack(_U32), self._unpack(_LENGTH)
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        self._check_room(count)
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return list(values)

    def _strings(self, count: int) -> list[str]:
        """The next ``count`` strings; written as one loop because vocabularies have hundreds of thousands."""
        self._check_room(count)
        data, offset, unpack = self._data, self._offset, _LENGTH.unpack_from
        end, strings = len(data), []
        for _ in range(count):
            start = offset + _LENGTH.size
            offset = start + unpack(data, offset)[0]
            if offset > end:
                raise IndexError(f"a string ends at byte {offset} of {end}")
            strings.append(data[start:offset].decode())
        self._offset = offset
        return strings

    def _check_room(self, count: int) -> None:
        """Refuse a count that the rest of the file cannot hold, before memory is taken for it."""
        if count > len(self._data) - self._offset:
            raise IndexError(f"an array of {count} values begins at byte {self._offset} of {len(self._data)}")

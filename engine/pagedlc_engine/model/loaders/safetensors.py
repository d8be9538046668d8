"""Weights from safetensors files, one or several."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pagedlc_engine.errors import ModelLoadError, UnsupportedModelError
from pagedlc_engine.model.loaders.base import WeightSource, tensor_shapes
from pagedlc_engine.model.loaders.staging import Staging
from pagedlc_engine.model.spec import ModelSpec

__all__ = ["SafetensorsWeights", "check_safetensors"]

_INDEX = "model.safetensors.index.json"
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Tensors some checkpoints carry although nobody needs them: old rotary tables, and the output matrix where it
#: is the embedding.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: from byte ``offset`` of ``file`` on, as numbers of type ``dtype``."""

    file: Path
    offset: int
    dtype: torch.dtype


def check_safetensors(folder: Path, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Check all files' headers against the spec, without reading weights.

    Returns:
        Tensor name to place.

    Raises:
        ModelLoadError: A file is truncated or damaged, or a tensor is missing, unexpected or misshapen.
        UnsupportedModelError: A tensor has a type the engine does not read.
    """
    places: dict[str, StoredTensor] = {}
    expected = tensor_shapes(spec)
    for file in _files(folder):
        start, entries = _read_header(file)
        for name, entry in entries.items():
            if name.endswith(_IGNORED_SUFFIX) or (name == "lm_head.weight" and spec.tie_word_embeddings):
                continue
            _check_tensor(file, name, entry, expected)
            places[name] = StoredTensor(file, start + entry["data_offsets"][0], _TYPES[entry["dtype"]])
    missing = [name for name in expected if name not in places]
    if missing:
        raise ModelLoadError(f"{folder}: the tensor {missing[0]} is missing ({len(missing)} missing in all).")
    return places


def _check_tensor(file: Path, name: str, entry: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    if name not in expected:
        raise ModelLoadError(f"{file}: the tensor {name} is not part of the model that config.json describes.")
    if tuple(entry["shape"]) != expected[name]:
        raise ModelLoadError(
            f"{file}: the tensor {name} has shape {tuple(entry['shape'])}, but config.json means {expected[name]}."
        )
    if entry["dtype"] not in _TYPES:
        raise UnsupportedModelError(
            f"{file}: the tensor {name} is of type {entry['dtype']}; supported are {', '.join(_TYPES)}."
        )
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(entry["shape"]) * _TYPES[entry["dtype"]].itemsize:
        raise ModelLoadError(
            f"{file} is damaged: the tensor {name} has {end - begin:,} bytes, which is not its shape's."
        )


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        single = folder / "model.safetensors"
        return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} cannot be read: {error!r}.") from None
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelLoadError(f"{folder}: the weight file {missing[0]} named by {_INDEX} is missing.")
    return [folder / name for name in names]


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begin, and its tensors' entries, the file's size checked against them."""
    size = file.stat().st_size
    with file.open("rb") as data:
        prefix = data.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ModelLoadError(f"{file} is truncated or damaged: its header is not complete. Fetch it again.")
        try:
            header = json.loads(data.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ModelLoadError(f"{file} is damaged: its header is not what safetensors write.") from None
    if end != size:
        raise ModelLoadError(
            f"{file} is truncated or damaged: its tensors end at byte {end:,}, but the file has {size:,}. "
            "Fetch it again."
        )
    return 8 + length, header


class SafetensorsWeights(WeightSource):
    """Reads one tensor at a time, or several at once straight to a GPU.

    Args:
        folder: Folder with ``model.safetensors``, or shards and their index.
        spec: The model.
        device: Where :meth:`read_into` brings tensors.

    Raises:
        ModelLoadError: See :func:`check_safetensors`.
    """

    readers = 4

    def __init__(self, folder: Path, spec: ModelSpec, device: torch.device) -> None:
        self._places = check_safetensors(folder, spec)
        self._staging = Staging(device)
        self._open: dict[Path, Any] = {}

    def get(self, name: str) -> torch.Tensor:
        """The tensor ``name``."""
        file = self._places[name].file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt", device="cpu")
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """See :class:`WeightSource`.

        Raises:
            ModelLoadError: The file became shorter since it was checked.
        """
        place = self._places[name]
        self._staging.copy(place.file, place.offset, place.dtype, out)

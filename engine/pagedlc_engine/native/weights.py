"""A model's weights as the native step wants them: 8-bit integers in groups, in one piece of memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagedlc_engine.errors import OutOfMemoryError
from pagedlc_engine.model.loaders.base import WeightSource
from pagedlc_engine.model.spec import ModelSpec
from pagedlc_engine.native.compiler import PANEL
from pagedlc_engine.native.library import Layer, Library, address

__all__ = ["PackedModel", "pack_model"]


class Arena:
    """Memory of packed weights, in huge pages where the system has them: a step reads all of it.

    Args:
        size: Bytes.

    Raises:
        OutOfMemoryError: There is not so much.
    """

    def __init__(self, size: int) -> None:
        try:
            # Private: most systems give huge pages to no other memory.
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"The model's weights ({size / 2**20:.0f} MiB) do not fit into memory.") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._start = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._used = 0

    def take(self, size: int) -> int:
        """The address of the next ``size`` bytes; sizes are multiples of 64, so all are aligned to a cache line."""
        at = self._start + self._used
        self._used += size
        return at


class Packer:
    """Packs matrices into an arena and keeps the small tensors that stay float32.

    Args:
        library: Knows the format.
        team: The threads.
        source: The model's weights.
        size: Bytes of all packed matrices.
    """

    def __init__(self, library: Library, team: Any, source: WeightSource, size: int) -> None:
        self._library = library
        self._team = team
        self._source = source
        self.arena = Arena(size)
        self.kept: list[torch.Tensor] = []

    def get(self, name: str) -> torch.Tensor:
        """The tensor ``name``, float32."""
        return self._source.get(name).float()

    def matrix(self, weight: torch.Tensor) -> int:
        """The address of ``weight`` ``[out, in]``, packed."""
        weight = weight.contiguous()
        outputs, width = weight.shape
        at = self.arena.take(self._library.packed_bytes(outputs, width))
        self._library.pack(self._team, address(weight), outputs, width, at)
        return at

    def keep(self, vector: torch.Tensor) -> int | None:
        """The address of a norm weight or bias."""
        # A copy: a view would keep the file, or a larger tensor, in memory.
        self.kept.append(vector.contiguous().clone())
        return address(self.kept[-1])


class PackedModel:
    """Addresses of a packed model's parts, and what keeps them alive."""

    def __init__(self, packer: Packer, layers: list[Layer], norm: int | None, head: int, embedding: torch.Tensor):
        self._packer = packer
        self.layers = (Layer * len(layers))(*layers)
        self.norm = norm
        self.head = head
        self.embedding = embedding


@torch.inference_mode()
def pack_model(
    source: WeightSource,
    spec: ModelSpec,
    library: Library,
    team: Any,
    progress: Callable[[int, int], None] | None = None,
) -> PackedModel:
    """Read and pack all weights.

    Args:
        source: The model's weights.
        spec: The model.
        library: Knows the format.
        team: The threads.
        progress: Called with (parts done, parts in all).
    """
    packer = Packer(library, team, source, _packed_bytes(spec, library))
    total = spec.num_layers + 1
    layers = []
    for index in range(spec.num_layers):
        layers.append(_layer(packer, spec, index))
        if progress is not None:
            progress(index + 1, total)
    embedding = packer.get("model.embed_tokens.weight").contiguous()
    head = packer.matrix(embedding if spec.tie_word_embeddings else packer.get("lm_head.weight"))
    packed = PackedModel(packer, layers, packer.keep(packer.get("model.norm.weight")), head, embedding)
    if progress is not None:
        progress(total, total)
    return packed


def _packed_bytes(spec: ModelSpec, library: Library) -> int:
    heads = spec.num_heads * spec.head_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
    layer = (
        (qkv, spec.hidden_size),
        (spec.hidden_size, heads),
        (2 * spec.intermediate_size, spec.hidden_size),
        (spec.hidden_size, spec.intermediate_size),
    )
    size: int = library.packed_bytes(spec.vocab_size, spec.hidden_size)
    for outputs, width in layer:
        size += spec.num_layers * library.packed_bytes(outputs, width)
    return size


def _layer(packer: Packer, spec: ModelSpec, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def joined(kind: str, *names: str) -> torch.Tensor:
        return torch.cat([packer.get(f"{name}.{kind}") for name in names])

    qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    gate_up = [mlp + name for name in ("gate_proj", "up_proj")]
    return Layer(
        attention_norm=packer.keep(packer.get(prefix + "input_layernorm.weight")),
        qkv=packer.matrix(joined("weight", *qkv)),
        qkv_bias=packer.keep(joined("bias", *qkv)) if spec.qkv_bias else None,
        query_norm=packer.keep(packer.get(attention + "q_norm.weight")) if spec.qk_norm else None,
        key_norm=packer.keep(packer.get(attention + "k_norm.weight")) if spec.qk_norm else None,
        output=packer.matrix(packer.get(attention + "o_proj.weight")),
        output_bias=packer.keep(packer.get(attention + "o_proj.bias")) if spec.o_bias else None,
        mlp_norm=packer.keep(packer.get(prefix + "post_attention_layernorm.weight")),
        gate_up=packer.matrix(_in_turns(joined("weight", *gate_up))),
        gate_up_bias=packer.keep(_in_turns(joined("bias", *gate_up))) if spec.mlp_bias else None,
        down=packer.matrix(packer.get(mlp + "down_proj.weight")),
        down_bias=packer.keep(packer.get(mlp + "down_proj.bias")) if spec.mlp_bias else None,
        window=spec.layer_windows[index] or 0,
    )


def _in_turns(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate rows and the up rows below them, :data:`PANEL` of each in turns."""
    halves = gate_up.view(2, -1, PANEL, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up.shape)

"""Paged attention in plain torch: the CPU's backend, and the reference on any other device.

The cache of a layer is one tensor ``[num_blocks, block_size, 2 * num_kv_heads, head_dim]``, keys before
values, so that a single gather of whole blocks fetches both.

No value that a request did not write is ever multiplied for it, except in the unwritten rest of its last
block. That rest is cleared when the block is taken into use, so that not even infinities or NaNs left by
an earlier owner of the block can reach another request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagedlc_engine.attention.base import AttentionBatch, IntArray, cpu_cache_too_large, kv_bytes_per_block
from pagedlc_engine.attention.parts import Limits, contiguous, split_step
from pagedlc_engine.attention.torch_parts import Geometry, LayerCache, StepAttention

if TYPE_CHECKING:
    from pagedlc_engine.model.spec import ModelSpec

__all__ = ["TorchAttention"]

# Measured: decoding over gathers of this size takes two thirds of the time it takes over unlimited ones,
# whose keys have left the processor's cache before they are used.
_GATHER_BYTES = 4 << 20


class TorchAttention:
    """See :class:`pagedlc_engine.attention.base.AttentionBackend`.

    Args:
        spec: The model.
        block_size: Tokens per block.
        num_blocks: Physical blocks.
        dtype: Type of cached keys and values, and of queries.
        device: Where the cache lives.
        limits: When splitting a step into parts pays; ``None`` takes what was measured on a CPU.

    Raises:
        OutOfMemoryError: The cache does not fit into the device's memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        limits: Limits | None = None,
    ) -> None:
        self._geometry = Geometry(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, dtype, device)
        self._windows = spec.layer_windows
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        self._limits = limits or Limits(gather_tokens=max(_GATHER_BYTES // token_bytes, block_size))
        shape = (num_blocks, block_size, 2 * spec.num_kv_heads, spec.head_dim)
        try:
            self._caches = [
                # Not cleared, so not in memory before it is used; nobody is shown what was there (see above).
                LayerCache(torch.empty(shape, dtype=dtype, device=device), spec.num_kv_heads)
                for _ in range(spec.num_layers)
            ]
        except RuntimeError as error:
            raise cpu_cache_too_large(num_blocks, kv_bytes_per_block(spec, block_size, dtype)) from error

    def plan(self, batch: AttentionBatch) -> TorchLayerAttention:
        """Prepare one step: cut it into parts once per distinct window, and build all index tensors."""
        longest = int(batch.context_lens.max())
        windows = [None if window is None or window >= longest else window for window in self._windows]
        steps = {window: self._plan_window(batch, window) for window in set(windows)}
        writer = _Writer(batch.slot_mapping, self._geometry)
        return TorchLayerAttention(self._caches, writer, [steps[window] for window in windows])

    def _plan_window(self, batch: AttentionBatch, window: int | None) -> StepAttention:
        parts = split_step(batch, self._geometry.block_size, window, self._limits)
        return StepAttention(parts, self._geometry)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, destination)`` in every layer."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=self._geometry.device).unbind(1)
        for cache in self._caches:
            cache.blocks.index_copy_(0, destinations, cache.blocks.index_select(0, sources))


class TorchLayerAttention:
    """One planned step; see :class:`pagedlc_engine.attention.base.LayerAttention`."""

    def __init__(self, caches: list[LayerCache], writer: _Writer, steps: list[StepAttention]) -> None:
        self._caches = caches
        self._writer = writer
        self._steps = steps

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the step's keys and values of ``layer`` and answer its queries: ``[T, num_heads * head_dim]``."""
        cache = self._caches[layer]
        self._writer(cache, key, value)
        return self._steps[layer](cache, query, key, value).reshape(query.shape[0], -1)


class _Writer:
    """Stores a step's keys and values: by slices where the slots are consecutive, else by one indexed copy.

    Args:
        slots: ``[T]`` slots of the step's tokens.
        geometry: Sizes.
    """

    def __init__(self, slots: IntArray, geometry: Geometry) -> None:
        run = contiguous(slots)
        self._where = slice(int(slots[0]), int(slots[-1]) + 1) if run else geometry.indices(slots)
        opened = _partly_filled_new_blocks(slots, geometry.block_size)
        self._opened = geometry.indices(opened) if len(opened) else None

    def __call__(self, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        if self._opened is not None:
            cache.blocks.index_fill_(0, self._opened, 0.0)
        if isinstance(self._where, slice):
            cache.key_slots[self._where] = key
            cache.value_slots[self._where] = value
        else:
            cache.slots.index_copy_(0, self._where, torch.cat((key, value), dim=1))


def _partly_filled_new_blocks(slots: IntArray, block_size: int) -> IntArray:
    """Blocks whose first slot the step writes, and whose last it does not."""
    offsets = slots % block_size
    opened: IntArray = slots[offsets == 0] // block_size
    if not len(opened):
        return opened
    return np.setdiff1d(opened, slots[offsets == block_size - 1] // block_size)

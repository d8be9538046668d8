"""Paged attention by the Triton kernels: the backend of NVIDIA GPUs.

A step's description goes to the device in one copy; per layer there is one kernel that stores keys and values and
one to three that attend. Prefixes that enough decoding requests share are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedlc_engine.attention.base import AttentionBatch, kv_bytes_per_block
from pagedlc_engine.errors import OutOfMemoryError
from pagedlc_engine.kernels.attention_plan import AttentionGeometry, AttentionPlan, plan_attention
from pagedlc_engine.kernels.paged_attention import paged_attention
from pagedlc_engine.kernels.rope_cache import write_cache

if TYPE_CHECKING:
    from pagedlc_engine.model.spec import ModelSpec

__all__ = ["TritonAttention", "TritonLayerAttention", "allocate_cache", "attention_geometry"]

_INTERPRETED_PROCESSORS = 132


def attention_geometry(spec: ModelSpec, block_size: int, device: torch.device) -> AttentionGeometry:
    """What the kernels must know of a model, its cache and its device."""
    processors = _INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return AttentionGeometry(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, processors)


def allocate_cache(
    spec: ModelSpec, block_size: int, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The KV cache of all layers: ``[layers, 2, blocks, block_size, kv_heads, head_dim]``, keys before values.

    Raises:
        OutOfMemoryError: It does not fit into the device's memory.
    """
    shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    try:
        # Not cleared: the kernels never use a slot that no request has written.
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        size = num_blocks * kv_bytes_per_block(spec, block_size, dtype)
        raise OutOfMemoryError(
            f"The KV cache of {num_blocks} blocks ({size / 2**30:.1f} GiB) could not be allocated on {device}; "
            "lower gpu_memory_utilization, kv_cache_memory_bytes or num_blocks."
        ) from error


class TritonAttention:
    """See :class:`pagedlc_engine.attention.base.AttentionBackend`.

    Args:
        spec: The model.
        block_size: Tokens per block.
        num_blocks: Physical blocks.
        dtype: Type of cached keys and values, and of queries.
        device: A CUDA device; a CPU only with Triton's interpreter.

    Raises:
        OutOfMemoryError: The cache does not fit into the device's memory.
    """

    def __init__(
        self, spec: ModelSpec, block_size: int, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._geometry = attention_geometry(spec, block_size, device)
        self._windows = spec.layer_windows
        self._cache = allocate_cache(spec, block_size, num_blocks, dtype, device)

    def plan(self, batch: AttentionBatch) -> TritonLayerAttention:
        """Prepare one step: cut it into tiles and send them to the device."""
        plan = plan_attention(
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.slot_mapping,
            self._geometry,
            self._cache.device,
        )
        longest = int(plan.context_lens.max())
        windows = [None if window is None or window >= longest else window for window in self._windows]
        return TritonLayerAttention(self._cache, plan, windows)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, destination)`` in every layer."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=self._cache.device).unbind(1)
        self._cache.index_copy_(2, destinations, self._cache.index_select(2, sources))


class TritonLayerAttention:
    """One planned step; see :class:`pagedlc_engine.attention.base.LayerAttention`.

    Args:
        cache: ``[layers, 2, blocks, block_size, kv_heads, head_dim]``, keys before values.
        plan: The step.
        windows: Sliding window of each layer, ``None`` where it hides nothing.
    """

    def __init__(self, cache: Tensor, plan: AttentionPlan, windows: Sequence[int | None]) -> None:
        self._cache = cache
        self._plan = plan
        self._windows = windows
        self._scale = float(cache.shape[-1]) ** -0.5

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the step's keys and values of ``layer`` and answer its queries: ``[T, num_heads * head_dim]``."""
        keys, values = self._cache[layer]
        write_cache(_heads_together(key), _heads_together(value), self._plan.slots, keys, values)
        return self.attend(layer, query)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Answer queries whose keys and values are in the cache already, as after a fused projection kernel."""
        keys, values = self._cache[layer]
        out = paged_attention(
            _heads_together(query), keys, values, self._plan, scale=self._scale, window=self._windows[layer]
        )
        return out.view(query.shape[0], -1)


def _heads_together(tensor: Tensor) -> Tensor:
    """``[T, heads, head_dim]`` whose tokens may lie apart but are contiguous in themselves."""
    apart = tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]
    return tensor.contiguous() if apart else tensor

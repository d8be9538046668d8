"""The paged KV cache of the native step, and what the step must know about its requests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedlc_engine.attention.base import AttentionBatch, IntArray, cpu_cache_too_large, kv_bytes_per_block

if TYPE_CHECKING:
    from pagedlc_engine.model.spec import ModelSpec

__all__ = ["NativeAttention", "NativeStep"]


@dataclass(frozen=True, slots=True)
class NativeStep:
    """One planned step.

    Args:
        backend: Whose cache it uses.
        first_tokens: ``[B + 1]`` int64, where each request's tokens begin, and the end.
        block_tables: ``[B, max_blocks]`` int32.
        slots: ``[T]`` int64.
    """

    backend: NativeAttention
    first_tokens: IntArray
    block_tables: IntArray
    slots: IntArray


class NativeAttention:
    """See :class:`pagedlc_engine.attention.base.AttentionBackend`; only the native decoder understands its steps.

    A layer's cache is ``[num_blocks, num_kv_heads, 2, block_size * head_dim]``: of each block and head first the
    keys, dimension by dimension, so that one vector holds the same dimension of 16 keys, then the values, token by
    token.

    Args:
        spec: The model.
        block_size: Tokens per block.
        num_blocks: Physical blocks.
        dtype: float32.
        device: The CPU.

    Raises:
        OutOfMemoryError: The cache does not fit into memory.
    """

    def __init__(
        self, spec: ModelSpec, block_size: int, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks, spec.num_kv_heads, 2, block_size * spec.head_dim)
        try:
            # Not cleared, so not in memory before it is used; a query reads nothing its request did not write.
            self.caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        except RuntimeError as error:
            raise cpu_cache_too_large(num_blocks, kv_bytes_per_block(spec, block_size, dtype)) from error
        #: Of the layers' caches, as the compiled code takes them.
        self.addresses = (ctypes.c_void_p * spec.num_layers)(*(cache.data_ptr() for cache in self.caches))

    def plan(self, batch: AttentionBatch) -> NativeStep:
        """Prepare one step."""
        first_tokens = np.zeros(len(batch.query_lens) + 1, dtype=np.int64)
        np.cumsum(batch.query_lens, out=first_tokens[1:])
        return NativeStep(
            self,
            first_tokens,
            np.ascontiguousarray(batch.block_tables, dtype=np.int32),
            np.ascontiguousarray(batch.slot_mapping, dtype=np.int64),
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, destination)`` in every layer."""
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for cache in self.caches:
            cache.index_copy_(0, destinations, cache.index_select(0, sources))

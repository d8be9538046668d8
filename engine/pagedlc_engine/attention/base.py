"""The seam between the model runner and an attention implementation.

The runner describes one step as an :class:`AttentionBatch`; a backend turns it into a
:class:`LayerAttention`, which the decoder calls once per layer. Nothing here knows a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from pagedlc_engine.errors import OutOfMemoryError

if TYPE_CHECKING:
    import torch

    from pagedlc_engine.model.spec import ModelSpec

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "IntArray",
    "LayerAttention",
    "cpu_cache_too_large",
    "kv_bytes_per_block",
]

IntArray = npt.NDArray[np.integer]


def kv_bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that keys and values of one block take over all layers, whatever their layout."""
    size: int = spec.num_layers * block_size * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return size


def cpu_cache_too_large(num_blocks: int, bytes_per_block: int) -> OutOfMemoryError:
    """The error of a KV cache that the host has no memory for."""
    return OutOfMemoryError(
        f"The KV cache of {num_blocks} blocks ({num_blocks * bytes_per_block / 2**20:.0f} MiB) could not be allocated; "
        "lower num_blocks or kv_cache_memory_bytes."
    )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's requests, ragged and concatenated: ``B`` requests, ``T`` tokens.

    A request's tokens of this step are its last ones: positions ``context_len - query_len`` up to
    ``context_len - 1``. The token at position ``p`` attends to positions ``0 .. p``, and in a layer with a
    sliding window ``w`` only to those after ``p - w``. All keys and values of a step are in the cache before
    any of its queries is answered, so a request may read blocks that another one fills in the same step.

    Args:
        query_lens: ``[B]``, tokens of this step per request, each at least 1; their sum is ``T``.
        context_lens: ``[B]``, tokens in the KV cache per request once this step's tokens are written.
        block_tables: ``[B, max_blocks]``, physical block of each run of ``block_size`` tokens; rows are
            padded with 0.
        slot_mapping: ``[T]``, where each new token is stored: ``block * block_size + offset``.
    """

    query_lens: IntArray
    context_lens: IntArray
    block_tables: IntArray
    slot_mapping: IntArray


class LayerAttention(Protocol):
    """Attention of one planned step; called by the decoder once per layer, after rotary embedding."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store the step's keys and values of ``layer`` and answer its queries.

        Args:
            layer: Index of the layer, from 0.
            query: ``[T, num_heads, head_dim]``.
            key: ``[T, num_kv_heads, head_dim]``.
            value: ``[T, num_kv_heads, head_dim]``.

        Returns:
            ``[T, num_heads * head_dim]`` in the dtype of ``query``.
        """
        ...


class AttentionBackend(Protocol):
    """Owns the KV cache of all layers and plans the attention of each step."""

    def __init__(
        self, spec: ModelSpec, block_size: int, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the cache of all layers.

        Args:
            spec: The model.
            block_size: Tokens per block.
            num_blocks: Physical blocks, shared by all requests.
            dtype: Type of cached keys and values; queries come in the same type.
            device: Where the cache lives.

        Raises:
            OutOfMemoryError: The cache does not fit into the device's memory.
        """
        ...

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare one step: what the decoder takes, a :class:`LayerAttention` where it is
        :class:`~pagedlc_engine.model.decoder.Decoder`. What does not differ between layers is computed here, once."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer, for copy-on-write.

        Args:
            pairs: ``(source, destination)`` blocks; all sources are read before any destination is written.
        """
        ...

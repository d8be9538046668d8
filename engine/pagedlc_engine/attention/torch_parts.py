"""Computing the parts of :mod:`pagedlc_engine.attention.parts` with torch: index tensors once, few calls per layer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagedlc_engine.attention.base import IntArray
from pagedlc_engine.attention.dense import attend, mask_value, merge_
from pagedlc_engine.attention.parts import BandPart, ChunkPart, PrefixPart, RowsPart, StepParts, contiguous

__all__ = ["Geometry", "LayerCache", "StepAttention"]

Result = tuple[Tensor, Tensor]


class Geometry:
    """Sizes that every part needs.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key heads; divides ``num_heads``.
        head_dim: Elements per head.
        block_size: Tokens per block.
        dtype: Type of queries and cache.
        device: Where the cache lives.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.device = device

    def indices(self, array: IntArray) -> Tensor:
        """``array`` flattened, as an index tensor on the device."""
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1)).to(self.device)


class LayerCache:
    """One layer's part of the cache and the views of it that the hot path needs, made once.

    Args:
        blocks: ``[num_blocks, block_size, 2 * num_kv_heads, head_dim]``, keys before values.
        num_kv_heads: Key heads.
    """

    def __init__(self, blocks: Tensor, num_kv_heads: int) -> None:
        self.blocks = blocks
        #: ``[slots, 2 * num_kv_heads, head_dim]``
        self.slots = blocks.flatten(0, 1)
        #: ``[slots, num_kv_heads, head_dim]``
        self.key_slots, self.value_slots = self.slots[:, :num_kv_heads], self.slots[:, num_kv_heads:]
        #: ``[1, num_kv_heads, slots, head_dim]``
        self.key_heads = self.key_slots.transpose(0, 1)[None]
        self.value_heads = self.value_slots.transpose(0, 1)[None]


class _Tokens:
    """Some of a step's tokens: a slice where they are consecutive, an index tensor otherwise.

    Args:
        tokens: ``[R]`` or padded ``[N, Q]``.
        query_lens: ``[N]``, for padded tokens: how many of each row are real.
    """

    def __init__(self, tokens: IntArray, geometry: Geometry, query_lens: IntArray | None = None) -> None:
        real = tokens.reshape(-1)
        self._unpad: Tensor | None = None
        self._padded: Tensor | None = None
        if query_lens is not None and (query_lens != tokens.shape[-1]).any():
            kept = np.flatnonzero((np.arange(tokens.shape[1]) < query_lens[:, None]).reshape(-1))
            self._unpad = geometry.indices(kept)
            self._padded = geometry.indices(real)
            real = real[kept]
        self._where = slice(int(real[0]), int(real[-1]) + 1) if contiguous(real) else geometry.indices(real)
        self.count = len(real)

    def take(self, source: Tensor) -> Tensor:
        """The tokens' rows of ``source``, padded."""
        where = self._where if self._padded is None else self._padded
        return source[where] if isinstance(where, slice) else source.index_select(0, where)

    def unpad(self, result: Result) -> Result:
        """Drop the rows of padding queries."""
        if self._unpad is None:
            return result
        return result[0].index_select(0, self._unpad), result[1].index_select(0, self._unpad)

    def store(self, out: Tensor, lse: Tensor, result: Result) -> None:
        """Put the tokens' results in place."""
        if isinstance(self._where, slice):
            out[self._where] = result[0]
            lse[self._where] = result[1]
        else:
            out.index_copy_(0, self._where, result[0])
            lse.index_copy_(0, self._where, result[1])

    def merge(self, out: Tensor, lse: Tensor, result: Result) -> None:
        """Fold the tokens' results over further keys in."""
        if isinstance(self._where, slice):
            merge_(out[self._where], lse[self._where], *result)
            return
        own: Result = (out.index_select(0, self._where), lse.index_select(0, self._where))
        merge_(*own, *result)
        self.store(out, lse, own)


class _Keys:
    """Gathers whole blocks of a layer's cache, or views them where one row's blocks lie in one run.

    Args:
        blocks: ``[N, blocks]``.
        geometry: Sizes.
        length: Keys to take of each row; ``None`` takes all.
    """

    def __init__(self, blocks: IntArray, geometry: Geometry, length: int | None = None) -> None:
        self._rows = len(blocks)
        self._kv_heads = geometry.num_kv_heads
        self._length = length if length is not None else blocks.shape[1] * geometry.block_size
        in_place = len(blocks) == 1 and contiguous(blocks[0])
        first = int(blocks[0, 0]) * geometry.block_size
        self._where = slice(first, first + self._length) if in_place else geometry.indices(blocks)

    def __call__(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Keys and values, each ``[N, num_kv_heads, length, head_dim]``."""
        where = self._where
        if isinstance(where, slice):
            return cache.key_heads[:, :, where], cache.value_heads[:, :, where]
        chosen = cache.blocks.index_select(0, where)
        both = chosen.view(self._rows, -1, *chosen.shape[2:])[:, : self._length].transpose(1, 2)
        return both[:, : self._kv_heads], both[:, self._kv_heads :]


class _Part(Protocol):
    tokens: _Tokens

    def __call__(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> Result: ...


class _Rows:
    """:class:`RowsPart`: the query heads of a key head, and the queries of a row, are stacked as rows of one
    product per key head, so that keys are read once for all of them."""

    def __init__(self, part: RowsPart, geometry: Geometry) -> None:
        self.tokens = _Tokens(part.tokens, geometry, part.query_lens)
        self._size = geometry
        self._rows, self._queries = part.tokens.shape
        length = part.blocks.shape[1] * geometry.block_size
        exact = int(part.key_end[0]) if self._rows == 1 and not part.key_begin[0] else None
        self._keys = _Keys(part.blocks, geometry, exact)
        self._mask = None if exact is not None else self._make_mask(part, length)

    def _make_mask(self, part: RowsPart, length: int) -> Tensor | None:
        if not part.key_begin.any() and (part.key_end == length).all():
            return None
        position = np.arange(length)
        hidden = (position < part.key_begin[:, None]) | (position >= part.key_end[:, None])
        value = mask_value(self._size.dtype)
        mask = torch.from_numpy(np.where(hidden, value, 0.0).astype(np.float64))
        return mask.to(self._size.device, self._size.dtype)[:, None, None, :]

    def __call__(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> Result:
        size = self._size
        rows, queries = self._rows, self._queries
        taken = self.tokens.take(query)
        if queries == 1:
            stacked = taken.view(rows, size.num_kv_heads, size.group, size.head_dim)
            out, lse = attend(stacked, *self._keys(cache), self._mask)
            return out.reshape(rows, size.num_heads, size.head_dim), lse.reshape(rows, size.num_heads)
        grouped = taken.view(rows, queries, size.num_kv_heads, size.group, size.head_dim).transpose(1, 2)
        stacked = grouped.reshape(rows, size.num_kv_heads, queries * size.group, size.head_dim)
        out, lse = attend(stacked, *self._keys(cache), self._mask)
        out = out.view(rows, size.num_kv_heads, queries, size.group, size.head_dim).transpose(1, 2)
        lse = lse.view(rows, size.num_kv_heads, queries, size.group).transpose(1, 2)
        flat = rows * queries
        result = out.reshape(flat, size.num_heads, size.head_dim), lse.reshape(flat, size.num_heads)
        return self.tokens.unpad(result)


class _Prefix:
    """:class:`PrefixPart`: the tokens of all requests are rows of one product."""

    # From here on one head's queries alone keep the product busy, and copying them together does not pay.
    _STACK_BELOW = 64

    def __init__(self, part: PrefixPart, geometry: Geometry) -> None:
        self.tokens = _Tokens(part.tokens, geometry)
        self._keys = _Keys(part.blocks[None], geometry, part.length)
        self._size = geometry

    def __call__(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> Result:
        size, count = self._size, self.tokens.count
        taken = self.tokens.take(query)
        if count >= self._STACK_BELOW:
            out, lse = attend(taken.transpose(0, 1)[None], *self._keys(cache))
            return out[0].transpose(0, 1), lse[0].transpose(0, 1)
        grouped = taken.view(count, size.num_kv_heads, size.group, size.head_dim).transpose(0, 1)
        stacked = grouped.reshape(1, size.num_kv_heads, count * size.group, size.head_dim)
        out, lse = attend(stacked, *self._keys(cache))
        out = out.view(size.num_kv_heads, count, size.group, size.head_dim).transpose(0, 1)
        lse = lse.view(size.num_kv_heads, count, size.group).transpose(0, 1)
        return out.reshape(count, size.num_heads, size.head_dim), lse.reshape(count, size.num_heads)


class _Chunk:
    """:class:`ChunkPart`: reads the step's own keys and values, not the cache. Padding needs no mask, as it
    lies in every real query's future."""

    def __init__(self, part: ChunkPart, geometry: Geometry) -> None:
        self.tokens = _Tokens(part.tokens, geometry, part.query_lens)
        self._rows, self._queries = part.tokens.shape

    def __call__(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> Result:
        query, key, value = (
            self.tokens.take(each).view(self._rows, self._queries, *each.shape[1:]).transpose(1, 2)
            for each in (query, key, value)
        )
        out, lse = attend(query, key, value, causal=True)
        return self.tokens.unpad((out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)))


class _Band:
    """:class:`BandPart`: an explicit mask of bounded size."""

    def __init__(self, part: BandPart, geometry: Geometry) -> None:
        self.tokens = _Tokens(part.tokens, geometry)
        length = part.query_offset + len(part.tokens)
        self._keys = _Keys(part.blocks[None], geometry, length)
        distance = np.arange(part.query_offset, length)[:, None] - np.arange(length)
        hidden = torch.from_numpy((distance < 0) | (distance >= part.window)).to(geometry.device)
        mask = torch.zeros(hidden.shape, dtype=geometry.dtype, device=geometry.device)
        self._mask = mask.masked_fill_(hidden, mask_value(geometry.dtype))[None, None]

    def __call__(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> Result:
        taken = self.tokens.take(query).transpose(0, 1)[None]
        out, lse = attend(taken, *self._keys(cache), self._mask)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)


class StepAttention:
    """A step's attention in the layers of one window.

    Args:
        parts: The step, cut.
        geometry: Sizes.
    """

    def __init__(self, parts: StepParts, geometry: Geometry) -> None:
        self._first = [self._prepare(part, geometry) for part in parts.first]
        self._merged = [self._prepare(part, geometry) for part in parts.merged]

    @staticmethod
    def _prepare(part: RowsPart | PrefixPart | ChunkPart | BandPart, geometry: Geometry) -> _Part:
        if isinstance(part, RowsPart):
            return _Rows(part, geometry)
        if isinstance(part, PrefixPart):
            return _Prefix(part, geometry)
        if isinstance(part, ChunkPart):
            return _Chunk(part, geometry)
        return _Band(part, geometry)

    def __call__(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over one layer's ``cache``, which holds the step's keys already; ``[T, H, D]``."""
        if len(self._first) == 1:
            out, lse = self._first[0](cache, query, key, value)
        else:
            out = torch.empty_like(query)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            for part in self._first:
                part.tokens.store(out, lse, part(cache, query, key, value))
        for part in self._merged:
            part.tokens.merge(out, lse, part(cache, query, key, value))
        return out

"""Row-wise searches over a vocabulary, done in two levels.

Reductions that return only values run many times faster on a CPU than those that return indices, and a short
row sorts faster than a long one. So each row is seen as chunks: reduce every chunk to its maximum, pick the
chunks that matter, and look inside those only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["CHUNK", "chunked", "largest", "row_argmax", "select", "take_chunk"]

CHUNK = 128


def select(values: Tensor, rows: Tensor | None) -> Tensor:
    """``values[rows]``, or ``values`` itself (no copy) when ``rows`` is ``None``, meaning all of them."""
    return values if rows is None else values.index_select(0, rows)


def chunked(values: Tensor, fill: float) -> Tensor:
    """View [R, V] as [R, V / CHUNK, CHUNK]; where V does not divide, a copy is filled up with ``fill``."""
    missing = -values.shape[1] % CHUNK
    if missing:
        values = pad(values, (0, missing), value=fill)
    return values.view(values.shape[0], -1, CHUNK)


def take_chunk(chunks: Tensor, index: Tensor) -> Tensor:
    """From [R, N, CHUNK] the chunk ``index`` (int64 [R]) of each row, as [R, CHUNK]."""
    return chunks[torch.arange(len(chunks), device=chunks.device), index]


def row_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum and where it first occurs; NaN counts as the largest.

    Args:
        values: float [R, V].

    Returns:
        Maxima [R] and indices int64 [R].
    """
    chunks = chunked(values, -torch.inf)
    maxima, chunk = chunks.amax(-1).max(-1)
    return maxima, chunk * CHUNK + take_chunk(chunks, chunk).argmax(-1)


def largest(values: Tensor, k: int) -> Tensor:
    """The ``k`` largest values of each row of [R, V], in descending order, as [R, k]."""
    chunks = chunked(values, -torch.inf)
    if 2 * k < chunks.shape[1]:
        # Any k chunks with the greatest maxima hold k values at least as large as everything outside them.
        best = chunks.amax(-1).topk(k, sorted=False).indices
        values = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    return values.topk(k).values

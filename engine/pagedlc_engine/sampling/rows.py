"""Row-wise searches over a vocabulary, done in two levels.

Reductions that return only values run many times faster on a CPU than those that return indices, and a short
row sorts faster than a long one. So each row is seen as chunks: reduce every chunk to its maximum, pick the
chunks that matter, and look inside those only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["CHUNK", "chunked", "largest", "row_argmax", "row_sums", "select", "send_ints", "take_chunks"]

CHUNK = 128


def send_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """``values`` as int64 [N] on ``device``, without waiting for what the device has to do before."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def select(values: Tensor, rows: Tensor | None) -> Tensor:
    """``values[rows]``, or ``values`` itself (no copy) when ``rows`` is ``None``, meaning all of them."""
    return values if rows is None else values.index_select(0, rows)


def chunked(values: Tensor, fill: float) -> Tensor:
    """View [R, V] as [R, V / CHUNK, CHUNK]; where V does not divide, a copy is filled up with ``fill``."""
    rows, columns = values.shape
    missing = -columns % CHUNK
    if missing:
        values = pad(values, (0, missing), value=fill)
    return values.view(rows, (columns + missing) // CHUNK, CHUNK)


def row_sums(values: Tensor) -> Tensor:
    """Each row's sum: [R, V] to float64 [R, 1], the same to the last bit whatever other rows there are. By itself torch
    shares a long row out among its threads where there is only one, and several rows it does not."""
    return chunked(values, 0.0).sum(-1, dtype=torch.float64).sum(-1, keepdim=True)


def take_chunks(chunks: Tensor, index: Tensor) -> Tensor:
    """From [R, N, CHUNK] the chunks ``index`` (int64 [R, K]) of each row, as [R, K, CHUNK]."""
    rows, per_row, width = chunks.shape
    starts = torch.arange(0, rows * per_row, per_row, device=chunks.device)
    flat = (index + starts[:, None]).flatten()
    return chunks.reshape(-1, width).index_select(0, flat).view(*index.shape, width)


def row_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum and where it first occurs; NaN counts as the largest.

    Args:
        values: float [R, V].

    Returns:
        Maxima [R] and indices int64 [R].
    """
    chunks = chunked(values, -torch.inf)
    maxima, chunk = chunks.amax(-1).max(-1)
    return maxima, chunk * CHUNK + take_chunks(chunks, chunk[:, None])[:, 0].argmax(-1)


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest values of each row of [R, V], in descending order, and where they are (int64), [R, k] each."""
    chunks = chunked(values, -torch.inf)
    if 2 * k >= chunks.shape[1]:
        return values.topk(k)
    # Any k chunks with the greatest maxima hold k values at least as large as everything outside them.
    best = chunks.amax(-1).topk(k, sorted=False).indices
    top, place = take_chunks(chunks, best).flatten(1).topk(k)
    return top, best.gather(1, place // CHUNK) * CHUNK + place % CHUNK

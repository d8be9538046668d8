"""Draw one token per row by inverting the cumulative distribution at one uniform number."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedlc_engine.sampling.rows import CHUNK, chunked, take_chunks

__all__ = ["draw"]


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens with probability proportional to ``weights``.

    First a chunk of the vocabulary is found by the sums of chunks, then a token within it. A token of weight
    0 is never drawn, whatever rounding does. A row without a positive, finite sum gets some id in range.

    Args:
        weights: Not negative, float32 [R, V].
        uniforms: In [0, 1), float64 [R].

    Returns:
        int64 [R].
    """
    chunks = chunked(weights, 0.0)
    sums = chunks.sum(-1).to(torch.float64).cumsum(-1)
    chunk, rest = _invert(sums, uniforms[:, None] * sums[:, -1:])
    inner = take_chunks(chunks, chunk)[:, 0].to(torch.float64).cumsum(-1)
    token, _ = _invert(inner, rest)
    return (chunk * CHUNK + token)[:, 0].clamp_(max=weights.shape[1] - 1)


def _invert(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative sum exceeds ``target``, and the part of the target left within it.

    Such an index has a positive weight of its own, because the sum before it does not exceed the target. Rounding
    can lift the target to the total or beyond; it is held just below, where the last positive weight is found.
    """
    total = sums[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = sums.gather(1, (index - 1).clamp(min=0)).masked_fill_(index == 0, 0.0)
    return index, target - before

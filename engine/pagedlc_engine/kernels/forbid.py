"""A grammar's mask over the vocabulary, one bit a token, put onto logits in one pass that only writes."""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["forbid_tokens"]

_TILE = 4096


@triton.jit
def _forbid_kernel(logits, rows, bits, row_stride, words, vocab_size, TILE: tl.constexpr):
    """Grid (rows, tiles)."""
    row = tl.load(rows + tl.program_id(0))
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = column < vocab_size
    word = tl.load(bits + tl.program_id(0) * words + column // 32, mask=live, other=-1)
    forbidden = ((word >> (column % 32)) & 1) == 0
    tl.store(logits + row * row_stride + column, float("-inf"), mask=live & forbidden)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Set logits of tokens that are not allowed to -inf, in place: :func:`pagedlc_engine.sampling.masks.allow_only`.

    Args:
        logits: float32 [S, V], contiguous rows.
        rows: The rows that are masked, int64 [G].
        bits: One bit per token, lowest first, int32 [G, W] with W = V / 32, rounded up; 1 allows the token.
    """
    vocab_size = logits.shape[1]
    grid = len(rows), triton.cdiv(vocab_size, _TILE)
    _forbid_kernel[grid](logits, rows, bits, logits.stride(0), bits.shape[1], vocab_size, TILE=_TILE, num_warps=4)

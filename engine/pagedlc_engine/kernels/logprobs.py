"""Log-probability and rank of a token, and the likeliest tokens, in one kernel: one program a row.

The row is read once, for its norm, the rank and the largest value of each block. The likeliest tokens then come one by
one: the block with the largest value is read again, gives its token, and keeps the largest of what is left.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["measure_tokens"]

_BLOCK = 1024
_GROUP = 4


@triton.jit(do_not_specialize=["width", "table_width"])
def _measure_kernel(
    logits,
    token_ids,
    peaks,
    table,
    row_stride,
    vocab_size,
    num_blocks,
    width,
    table_width,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    peaks += row * num_blocks
    table += row * table_width
    # Where kernels are only being compiled, the token may be anything.
    token = tl.minimum(tl.maximum(tl.load(token_ids + row), 0), vocab_size - 1)
    chosen = tl.load(logits + token)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    likelier = tl.full([], 0, tl.int32)
    lane = tl.arange(0, GROUP)
    for start in range(0, num_blocks, GROUP):
        place = (start + lane)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        value = tl.load(logits + place, mask=place < vocab_size, other=float("-inf"))
        peak = tl.max(value, 1)
        tl.store(peaks + start + lane, peak, mask=start + lane < num_blocks)
        higher = tl.maximum(highest, tl.max(peak, 0))
        base = tl.where(higher > float("-inf"), higher, 0.0)
        total = total * tl.exp(highest - base) + tl.sum(tl.sum(tl.exp(value - base), 1), 0)
        highest = higher
        likelier += tl.sum(tl.sum((value > chosen).to(tl.int32), 1), 0)
    norm = highest + tl.log(total)
    tl.store(table, token.to(tl.float64))
    tl.store(table + 1, (chosen - norm).to(tl.float64))
    tl.store(table + 2, (likelier + 1).to(tl.float64))
    tl.debug_barrier()
    number = tl.arange(0, BLOCKS)
    peak = tl.load(peaks + number, mask=number < num_blocks, other=float("-inf"))
    # Tokens are listed by falling logit and then by rising number; what comes after the last one is left.
    last = tl.full([], float("inf"), tl.float32)
    last_column = tl.full([], -1, tl.int32)
    for count in range(width):
        best = tl.max(peak, 0)
        block = tl.min(tl.where(peak == best, number, num_blocks - 1), 0)
        column = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
        left = (column < vocab_size) & ((value < last) | ((value == last) & (column > last_column)))
        found = tl.min(tl.where(left & (value == best), column, vocab_size - 1), 0)
        rest = tl.max(tl.where(left & (column != found), value, float("-inf")), 0)
        peak = tl.where(number == block, rest, peak)
        last = best
        last_column = found
        tl.store(table + 3 + count, found.to(tl.float64))
        tl.store(table + 3 + width + count, (best - norm).to(tl.float64))


def measure_tokens(logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> torch.Tensor:
    """What :func:`pagedlc_engine.sampling.logprobs.measure` returns; of equal logits the first is listed first.

    Args:
        logits: Raw logits, float32 [R, V], contiguous rows.
        token_ids: int64 [R].
        width: How many of the likeliest tokens to list; fewer where there are not so many.

    Returns:
        float64 [R, 3 + 2 * width].
    """
    rows, vocab_size = logits.shape
    width = min(width, vocab_size)
    blocks = triton.cdiv(vocab_size, _BLOCK)
    table = torch.empty((rows, 3 + 2 * width), dtype=torch.float64, device=logits.device)
    _measure_kernel[(rows,)](
        logits,
        token_ids,
        torch.empty((rows, blocks), dtype=torch.float32, device=logits.device),
        table,
        logits.stride(0),
        vocab_size,
        blocks,
        width,
        table.shape[1],
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=_BLOCK,
        GROUP=_GROUP,
        num_warps=8,
    )
    return table

"""The general sampler's stages as one kernel each: a chain of torch operations costs the host more than the device."""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pagedlc_engine.sampling.history import TokenHistory
    from pagedlc_engine.sampling.penalties import Penalties

__all__ = ["forbid_tokens", "penalise_tokens", "record_tokens"]

_TILE = 4096
_LANES = 512


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


@triton.jit(do_not_specialize=["columns"])
def _penalise_kernel(
    before,
    logits,
    rows,
    history_rows,
    repetition,
    frequency,
    presence,
    tokens,
    lengths,
    counts,
    columns,
    vocab_size,
    LANES: tl.constexpr,
):
    """Grid (rows, tiles of the history). A token that is listed twice is written twice, with the same value."""
    number = tl.program_id(0)
    history_row = tl.load(history_rows + number)
    start = tl.load(rows + number) * vocab_size
    place = tl.program_id(1) * LANES + tl.arange(0, LANES)
    live = place < tl.load(lengths + history_row)
    token = tl.load(tokens + history_row * columns + place, mask=live, other=0)
    value = tl.load(before + start + token, mask=live, other=0.0)
    times = tl.load(counts + history_row * vocab_size + token, mask=live, other=0.0)
    factor = tl.load(repetition + number)
    value = tl.where(value > 0.0, value / factor, value * factor)
    value -= tl.load(frequency + number) * times
    value -= tl.where(times > 0.0, tl.load(presence + number), 0.0)
    tl.store(logits + start + token, value, mask=live)


def penalise_tokens(before: torch.Tensor, logits: torch.Tensor, penalties: Penalties, history: TokenHistory) -> None:
    """Penalise repeated tokens: :func:`pagedlc_engine.sampling.penalties.apply_penalties`.

    Args:
        before: Logits without penalties, float32 [S, V], contiguous.
        logits: Another tensor of the same contents; changed in place.
        penalties: Which rows, and how much.
        history: The tokens seen.
    """
    grid = len(penalties.rows), triton.cdiv(history.longest, _LANES)
    _penalise_kernel[grid](
        before,
        logits,
        penalties.rows,
        penalties.history_rows,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        history.tokens,
        history.lengths,
        history.counts,
        history.tokens.shape[1],
        logits.shape[1],
        LANES=_LANES,
        num_warps=4,
    )


@triton.jit
def _finite(value):
    return (value > float("-inf")) & (value < float("inf"))


@triton.jit(do_not_specialize=["columns"])
def _record_kernel(
    token_ids,
    raw_maxima,
    maxima,
    slots,
    history_rows,
    output_lengths,
    tokens,
    lengths,
    counts,
    bad_logits,
    nothing_allowed,
    columns,
    vocab_size,
):
    """Grid (rows,)."""
    row = tl.program_id(0)
    bad = 1 - _finite(tl.load(raw_maxima + row)).to(tl.int32)
    tl.store(bad_logits + row, bad.to(tl.uint8))
    closed = (1 - _finite(tl.load(maxima + row)).to(tl.int32)) * (1 - bad)
    tl.store(nothing_allowed + row, closed.to(tl.uint8))
    slot = tl.load(slots + row)
    tl.store(output_lengths + slot, tl.load(output_lengths + slot) + 1)
    history_row = tl.load(history_rows + row)
    if history_row >= 0:
        # Where kernels are only being compiled, the token may be anything.
        token = tl.minimum(tl.maximum(tl.load(token_ids + row), 0), vocab_size - 1)
        length = tl.load(lengths + history_row)
        tl.store(tokens + history_row * columns + length, token)
        tl.store(lengths + history_row, length + 1)
        count = counts + history_row * vocab_size + token
        tl.store(count, tl.load(count) + 1.0)


def record_tokens(
    token_ids: torch.Tensor,
    raw_maxima: torch.Tensor,
    maxima: torch.Tensor,
    slots: torch.Tensor,
    history_rows: torch.Tensor,
    output_lengths: torch.Tensor,
    history: TokenHistory,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count each row's token as output of its slot, and find out which rows failed.

    Args:
        token_ids: int64 [S].
        raw_maxima: Greatest of the model's logits, float32 [S].
        maxima: Greatest of the edited logits, float32 [S].
        slots: int64 [S], all different.
        history_rows: Row in the history, which has room for another token, or -1, int64 [S].
        output_lengths: Tokens of each slot, int64, changed in place.
        history: Changed in place.

    Returns:
        Rows whose raw logits are not finite numbers, and rows whose every token is forbidden, bool [S] each.
    """
    bad_logits = torch.empty(len(token_ids), dtype=torch.uint8, device=token_ids.device)
    nothing_allowed = torch.empty_like(bad_logits)
    _record_kernel[(len(token_ids),)](
        token_ids,
        raw_maxima,
        maxima,
        slots,
        history_rows,
        output_lengths,
        history.tokens,
        history.lengths,
        history.counts,
        bad_logits,
        nothing_allowed,
        history.tokens.shape[1],
        history.counts.shape[1],
        num_warps=1,
    )
    return bad_logits.view(torch.bool), nothing_allowed.view(torch.bool)

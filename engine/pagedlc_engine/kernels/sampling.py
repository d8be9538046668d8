"""From logits to token ids in two or three launches, without a look from the host.

The first launch reduces parts of a row to (largest, its index, sum of weights), the second picks a part and then a
token in it. A draw inverts the cumulative distribution at one uniform number per row, the n-th of the row's seed:
the same rule and the same numbers as :mod:`pagedlc_engine.sampling.draw` and :mod:`pagedlc_engine.sampling.rng`, and
less arithmetic than one random number per logit (Gumbel noise).

A third launch takes another pick for rows with min_p, top_k or top_p: :mod:`pagedlc_engine.kernels.filtered_sampling`.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.filtered_sampling import (
    BLOCK,
    ROOM,
    has_filter,
    invert,
    log2_factor,
    pick_filtered_kernel,
    uniform_number,
)
from pagedlc_engine.kernels.launch import can_overlap, launch_options

__all__ = ["sample_tokens", "sample_tokens_reference"]


@triton.jit
def _scaled_logits(logits, row_start, column, vocab_size, factor):
    value = tl.load(logits + row_start + column, mask=column < vocab_size, other=float("-inf"))
    return value.to(tl.float32) * factor


@triton.jit
def _factor(temperatures, row, DRAW: tl.constexpr):
    """What logits are multiplied by before ``exp2``; 1 for a greedy row."""
    factor = 1.0
    if DRAW:
        temperature = tl.load(temperatures + row).to(tl.float32)
        factor = tl.where(temperature > 0.0, log2_factor(tl.where(temperature > 0.0, temperature, 1.0)), 1.0)
    return factor


@triton.jit
def _parts_kernel(
    logits,
    temperatures,
    filters,
    peaks,
    sums,
    indices,
    block_peaks,
    row_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (parts, rows). Of rows with a filter the largest values of blocks are noted, too."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1)
    column = part * CHUNK + tl.arange(0, CHUNK)
    value = _scaled_logits(logits, row.to(tl.int64) * row_stride, column, vocab_size, _factor(temperatures, row, DRAW))
    target = row * tl.num_programs(0) + part
    peak = tl.max(value, 0)
    if BLOCK < CHUNK:
        if has_filter(temperatures, filters, row, vocab_size):
            block_peak = tl.max(tl.reshape(value, [CHUNK // BLOCK, BLOCK]), 1)
            tl.store(block_peaks + target * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK), block_peak)
    tl.store(peaks + target, peak)
    tl.store(indices + target, tl.min(tl.where(value == peak, column, 2147483647), 0))
    if DRAW:
        base = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(sums + target, tl.sum(tl.exp2(value - base), 0))


@triton.jit
def _pick_kernel(
    logits,
    temperatures,
    seeds,
    counters,
    peaks,
    sums,
    indices,
    out,
    row_stride,
    vocab_size,
    num_parts,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    DRAW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows,)."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    live = part < num_parts
    peak = tl.load(peaks + row * num_parts + part, mask=live, other=float("-inf"))
    highest = tl.max(peak, 0)
    index = tl.load(indices + row * num_parts + part, mask=live, other=2147483647)
    token = tl.min(tl.where(peak == highest, index, 2147483647), 0)
    if DRAW:
        if tl.load(temperatures + row).to(tl.float32) > 0.0:
            random = uniform_number(seeds, counters, row)
            weight = tl.load(sums + row * num_parts + part, mask=live, other=0.0) * tl.exp2(peak - highest)
            wanted = (random * tl.sum(weight, 0).to(tl.float64)).to(tl.float32)
            chosen, rest = invert(weight, wanted, PARTS)
            column = chosen * CHUNK + tl.arange(0, CHUNK)
            factor = _factor(temperatures, row, DRAW)
            value = _scaled_logits(logits, row.to(tl.int64) * row_stride, column, vocab_size, factor)
            inner, _ = invert(tl.exp2(value - highest), rest, CHUNK)
            token = chosen * CHUNK + inner
    # A row of NaN has no largest value; its token means nothing, but it is one.
    tl.store(out + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    counters: torch.Tensor | None,
    filters: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token a row: drawn from ``softmax(logits / temperature)``, or the likeliest where the temperature is 0.

    Args:
        logits: [S, V], contiguous rows; ``-inf`` forbids a token. Among equal logits the first is the likeliest.
        temperatures: float32 [S], or ``None`` for the likeliest everywhere.
        seeds: int64 [S]; unused without temperatures.
        counters: int64 [S], tokens the row's request has so far; unused without temperatures.
        filters: float32 [S, 3], what is drawn from: top_k (below 1 or from V on: all), top_p (1: all), min_p (0: all),
            with the meaning and the order that they have in :mod:`pagedlc_engine.sampling.filters`. Weights are summed
            in float32 here, so a token whose share of the mass is within some 1e-6 of top_p may fall to either side,
            as may a draw that close to the edge between two tokens.
        out: int64 [S]; allocated when ``None``.

    Returns:
        ``out``.
    """
    rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunk = 1024 if rows <= 8 else 4096
    parts = triton.cdiv(vocab_size, chunk)
    # Two tensors: a half of one would begin at an address of another alignment, for which Triton compiles anew.
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(peaks)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    draws = temperatures is not None
    unused = indices
    overlap = can_overlap()
    block = BLOCK if draws and filters is not None else chunk
    blocks = parts * (chunk // block)
    block_peaks = peaks
    if blocks > parts:
        block_peaks = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    _parts_kernel[(parts, rows)](
        logits,
        temperatures if temperatures is not None else unused,
        filters if filters is not None else unused,
        peaks,
        sums,
        indices,
        block_peaks,
        logits.stride(0),
        vocab_size,
        CHUNK=chunk,
        BLOCK=block,
        DRAW=draws,
        OVERLAP=overlap,
        **launch_options(4, 1, overlap=overlap),
    )
    _pick_kernel[(rows,)](
        logits,
        temperatures if temperatures is not None else unused,
        seeds if seeds is not None else unused,
        counters if counters is not None else unused,
        peaks,
        sums,
        indices,
        out,
        logits.stride(0),
        vocab_size,
        parts,
        PARTS=triton.next_power_of_2(parts),
        CHUNK=chunk,
        DRAW=draws,
        OVERLAP=overlap,
        **launch_options(4, 1, overlap=overlap),
    )
    if draws and filters is not None:
        pick_filtered_kernel[(rows,)](
            logits,
            temperatures,
            seeds,
            counters,
            filters,
            peaks,
            sums,
            block_peaks,
            torch.empty((rows, ROOM), dtype=torch.float32, device=logits.device),
            torch.empty((rows, blocks), dtype=torch.int32, device=logits.device),
            torch.empty((rows, blocks), dtype=torch.float32, device=logits.device),
            out,
            logits.stride(0),
            vocab_size,
            parts,
            blocks,
            PARTS=triton.next_power_of_2(parts),
            BLOCKS=triton.next_power_of_2(blocks),
            BLOCK=BLOCK,
            ROOM=ROOM,
            GROUP=16,
            WAYS=8,
            FEW=512,
            MANY=2048,
            OVERLAP=overlap,
            **launch_options(8, 1, overlap=overlap, max_registers=128),
        )
    return out


def sample_tokens_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    counters: torch.Tensor | None,
    filters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain-torch :func:`sample_tokens`."""
    # The kernels themselves need nothing of the engine.
    from pagedlc_engine.sampling.draw import draw
    from pagedlc_engine.sampling.rng import uniform

    likeliest = logits.argmax(-1)
    if temperatures is None or seeds is None or counters is None:
        return likeliest
    greedy = temperatures <= 0
    logits = logits.float() - logits.float().amax(-1, keepdim=True)
    weights = (logits / temperatures.masked_fill(greedy, 1.0)[:, None]).exp()
    if filters is not None:
        _filter(weights, filters)
    return torch.where(greedy, likeliest, draw(weights, uniform(seeds, counters)))


def _filter(weights: torch.Tensor, filters: torch.Tensor) -> None:
    """Set what each row of weights (float32 [S, V], the greatest 1) does not draw from to 0."""
    from pagedlc_engine.sampling.filters import TopK, drop_below, top_k_cut, top_p_cut

    drop_below(weights, filters[:, 2:])
    for row, (top_k, top_p, _) in zip(weights.split(1), filters.tolist(), strict=True):
        share = torch.tensor([[top_p]], dtype=torch.float64, device=row.device)
        if 0 < top_k < row.shape[1]:
            k = torch.tensor([[int(top_k)]], device=row.device)
            drop_below(row, top_k_cut(row, TopK(None, k, int(top_k), share)))
        elif top_p < 1.0:
            drop_below(row, top_p_cut(row, share))

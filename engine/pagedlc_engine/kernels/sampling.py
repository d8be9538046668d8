"""From logits to token ids in two launches, without a look from the host.

The first launch reduces parts of a row to (largest, its index, sum of weights), the second picks a part and then a
token in it. A draw inverts the cumulative distribution at one uniform number per row, the n-th of the row's seed:
the same rule and the same numbers as :mod:`pagedlc_engine.sampling.draw` and :mod:`pagedlc_engine.sampling.rng`, and
less arithmetic than one random number per logit (Gumbel noise).
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.launch import interpreted, launch_options

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
        factor = tl.where(temperature > 0.0, 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0), 1.0)
    return factor


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _parts_kernel(
    logits,
    temperatures,
    peaks,
    sums,
    indices,
    row_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    DRAW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (parts, rows)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1)
    column = part * CHUNK + tl.arange(0, CHUNK)
    value = _scaled_logits(logits, row.to(tl.int64) * row_stride, column, vocab_size, _factor(temperatures, row, DRAW))
    peak = tl.max(value, 0)
    target = row * tl.num_programs(0) + part
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
            seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
            counter = tl.load(counters + row).to(tl.uint64)
            bits = _mix(_mix(seed + 0x9E3779B97F4A7C15) + (counter + 1) * 0x9E3779B97F4A7C15)
            random = (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
            weight = tl.load(sums + row * num_parts + part, mask=live, other=0.0) * tl.exp2(peak - highest)
            wanted = (random * tl.sum(weight, 0).to(tl.float64)).to(tl.float32)
            last = tl.max(tl.where(weight > 0.0, part, 0), 0)
            chosen = tl.minimum(tl.sum((tl.cumsum(weight, 0) <= wanted).to(tl.int32), 0), last)
            wanted -= tl.sum(tl.where(part < chosen, weight, 0.0), 0)
            offset = tl.arange(0, CHUNK)
            column = chosen * CHUNK + offset
            factor = _factor(temperatures, row, DRAW)
            value = _scaled_logits(logits, row.to(tl.int64) * row_stride, column, vocab_size, factor)
            inner = tl.exp2(value - highest)
            last = tl.max(tl.where(inner > 0.0, offset, 0), 0)
            token = chosen * CHUNK + tl.minimum(tl.sum((tl.cumsum(inner, 0) <= wanted).to(tl.int32), 0), last)
    tl.store(out + row, token.to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    counters: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token a row: drawn from ``softmax(logits / temperature)``, or the likeliest where the temperature is 0.

    Args:
        logits: [S, V], contiguous rows; ``-inf`` forbids a token. Among equal logits the first is the likeliest.
        temperatures: float32 [S], or ``None`` for the likeliest everywhere.
        seeds: int64 [S]; unused without temperatures.
        counters: int64 [S], tokens the row's request has so far; unused without temperatures.
        out: int64 [S]; allocated when ``None``.

    Returns:
        ``out``.
    """
    rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunk = 1024 if rows <= 8 else 4096
    parts = triton.cdiv(vocab_size, chunk)
    peaks = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    draws = temperatures is not None
    unused = indices
    overlap = not interpreted()
    _parts_kernel[(parts, rows)](
        logits,
        temperatures if temperatures is not None else unused,
        peaks[0],
        peaks[1],
        indices,
        logits.stride(0),
        vocab_size,
        CHUNK=chunk,
        DRAW=draws,
        OVERLAP=overlap,
        **launch_options(4, 1, overlap=overlap),
    )
    _pick_kernel[(rows,)](
        logits,
        temperatures if temperatures is not None else unused,
        seeds if seeds is not None else unused,
        counters if counters is not None else unused,
        peaks[0],
        peaks[1],
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
    return out


def sample_tokens_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    seeds: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """Plain-torch :func:`sample_tokens`."""
    from pagedlc_engine.sampling.draw import draw  # the kernels themselves need nothing of the engine
    from pagedlc_engine.sampling.rng import uniform

    likeliest = logits.argmax(-1)
    if temperatures is None or seeds is None or counters is None:
        return likeliest
    greedy = temperatures <= 0
    weights = (logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None]).softmax(-1)
    return torch.where(greedy, likeliest, draw(weights, uniform(seeds, counters)))

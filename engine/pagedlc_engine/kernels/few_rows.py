"""Matrix products with a few rows: the weight is read once, at memory speed, and its neighbours are fused in.

One row: a GEMV that holds its weight rows in registers, with the RMSNorm of the input inside. Up to sixteen rows:
``tl.dot`` over padded rows, the sum over K split between programs when there are too few of them. Both end in the
gate (``silu(gate) * up``) or the residual addition. In chains of such kernels weights are loaded before the wait on
the predecessor (programmatic dependent launch), with two to eight rows by :mod:`held_rows` where they are small enough.
Above sixteen rows cuBLAS is as good or better.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.held_rows import can_hold, held_linear
from pagedlc_engine.kernels.launch import dot_precision, interpreted, launch_options

__all__ = ["MAX_ROWS", "DotConfig", "RowsConfig", "SplitSums", "few_rows_linear", "few_rows_linear_reference"]

MAX_ROWS = 16
_LOCKS = 8192


@triton.jit
def _gemv_kernel(
    x,
    gain,
    weight,
    bias,
    residual,
    out,
    size,
    eps,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (ceil(size / ROWS),): outputs ROWS * program and on. DEPTH is the length of a weight row. EVEN: rows and
    chunks divide without a rest."""
    if OVERLAP:
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = (DEPTH + CHUNK - 1) // CHUNK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CHUNK)
    exists = row < size
    start = weight + row.to(tl.int64)[:, None] * DEPTH
    weights = ()
    ups = ()
    for chunk in tl.static_range(CHUNKS):
        at = start + (chunk * CHUNK + column)[None, :]
        if EVEN:
            weights = weights + (tl.load(at),)  # noqa: RUF005
            if GATED:
                ups = ups + (tl.load(at + size.to(tl.int64) * DEPTH),)  # noqa: RUF005
        else:
            inside = exists[:, None] & (chunk * CHUNK + column < DEPTH)[None, :]
            weights = weights + (tl.load(at, mask=inside, other=0.0),)  # noqa: RUF005
            if GATED:
                ups = ups + (tl.load(at + size.to(tl.int64) * DEPTH, mask=inside, other=0.0),)  # noqa: RUF005
    if OVERLAP:
        gdc_wait()
    products = tl.zeros([ROWS, CHUNK], tl.float32)
    products_up = tl.zeros([ROWS, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = chunk * CHUNK + column
        value = tl.load(x + at, mask=at < DEPTH, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(gain + at, mask=at < DEPTH, other=0.0).to(tl.float32)
        products += weights[chunk].to(tl.float32) * value[None, :]
        if GATED:
            products_up += ups[chunk].to(tl.float32) * value[None, :]
    total = tl.sum(products, 1)
    total_up = total
    if GATED:
        total_up = tl.sum(products_up, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / DEPTH + eps)
        total = total * scale
        total_up = total_up * scale
    if BIAS:
        total += tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
        if GATED:
            total_up += tl.load(bias + size + row, mask=exists, other=0.0).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    if RESIDUAL:
        total += tl.load(residual + row, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _dot_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    sums,
    locks,
    rows,
    size,
    share,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (ceil(size / BLOCK), SPLITS). ``share`` = DEPTH / SPLITS is an argument so that the compiler sees its
    divisibility. With splits the last program of a block to arrive adds up, in the same order every time."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, PADDED)
    step = tl.arange(0, STEP)
    exists = column < size
    used = row < rows
    at = weight + column.to(tl.int64)[None, :] * DEPTH + (split * share + step)[:, None]
    source = x + row[:, None] * DEPTH + (split * share + step)[None, :]
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([PADDED, BLOCK], tl.float32)
    acc_up = tl.zeros([PADDED, BLOCK], tl.float32)
    for start in range(0, share, STEP):
        inside = start + step < share
        value = tl.load(source + start, mask=used[:, None] & inside[None, :], other=0.0)
        w = tl.load(at + start, mask=exists[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(value, w, acc, input_precision=PRECISION)
        if GATED:
            up = tl.load(at + size.to(tl.int64) * DEPTH + start, mask=exists[None, :] & inside[:, None], other=0.0)
            acc_up = tl.dot(value, up, acc_up, input_precision=PRECISION)
    if OVERLAP:  # triggered earlier, the successor's programs would take the place of this kernel's own
        gdc_launch_dependents()
    target = row[:, None] * size + column[None, :]
    mask = used[:, None] & exists[None, :]
    finished = True
    if SPLITS > 1:
        tl.store(sums + split * rows * size + target, acc, mask=mask)
        tl.debug_barrier()
        finished = tl.atomic_add(locks + block, 1, sem="acq_rel") == SPLITS - 1
    if finished:
        if SPLITS > 1:
            acc = tl.zeros([PADDED, BLOCK], tl.float32)
            for part in range(SPLITS):
                acc += tl.load(sums + part * rows * size + target, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(locks + block, 0)
        if BIAS:
            acc += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[None, :]
            if GATED:
                acc_up += tl.load(bias + size + column, mask=exists, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        if RESIDUAL:
            acc += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Compile-time choices for one row: outputs a program, and warps."""

    rows: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class DotConfig:
    """Compile-time choices for several rows: outputs a program, K a step, splits of K, pipeline depth, warps."""

    block: int
    step: int
    splits: int
    num_stages: int = 4
    num_warps: int = 4


class SplitSums:
    """Memory through which programs that share a sum meet; one serves all products of a step in turn.

    Args:
        largest: Most outputs of a product whose K is split.
        device: A CUDA device, or a CPU with Triton's interpreter.
    """

    def __init__(self, largest: int, device: torch.device) -> None:
        self.sums = torch.empty(_MOST_SPLITS * MAX_ROWS * largest, dtype=torch.float32, device=device)
        self.locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)


_MOST_SPLITS = 8
_ENOUGH_PROGRAMS = 256
# Weights that a large program holds in registers: 128 in each of 256 threads.
_HELD = 32768


def _rows_config(size: int, depth: int, gated: bool, overlap: bool) -> RowsConfig:
    """Small programs finish together; in an overlapped chain over long rows large ones hold more weights before the
    wait on the predecessor."""
    if overlap and depth >= 4096:
        rows, warps = max(1, _HELD // (depth * (2 if gated else 1))), 8
    elif overlap and gated and depth <= 2048:
        rows, warps = 4, 8
    else:
        rows, warps = 4 if depth > 2048 or size >= 65536 else 2, 4
        if depth > 8192:
            rows = 1
    while rows > 1 and size // rows < _ENOUGH_PROGRAMS:
        rows //= 2
    return RowsConfig(1 << (rows.bit_length() - 1), warps)


def _dot_config(size: int, depth: int, gated: bool, can_split: bool, overlap: bool) -> DotConfig:
    """Alone, narrow blocks and short loops are best; in an overlapped chain half as many programs, which leave room
    for the next kernel's."""
    block = 64 if size >= 65536 or (overlap and can_split and not gated) else 32
    splits = 1
    while (
        can_split
        and not gated
        and splits < _MOST_SPLITS
        and size // block * splits < 256
        and (size // block * splits < 128 or (depth // splits > 2048 and not overlap))
        and depth % (2 * splits * 128) == 0
    ):
        splits *= 2
    return DotConfig(block, 128, splits)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    split_sums: SplitSums | None = None,
    overlap: bool = False,
    config: RowsConfig | DotConfig | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` for one to sixteen rows, with what surrounds it.

    Args:
        x: [M, K], contiguous, M at most ``MAX_ROWS``.
        weight: [N, K], contiguous; with ``gated`` [2 N, K], gate then up.
        gain: [K], weight of an RMS norm of ``x`` to apply first; one row only.
        eps: Added to the mean square.
        gated: The result is ``silu(gate) * up``.
        bias: [N], or [2 N] with ``gated``.
        residual: [M, N], added last; may be ``out``.
        out: [M, N], contiguous; allocated when ``None``.
        split_sums: Memory for splitting K; ``None`` does not split.
        overlap: Programmatic dependent launch; ``x`` and ``residual`` may come from the kernel before, the rest not.
        config: Compile-time choices instead of the built-in rule's.

    Returns:
        ``out``, summed in float32.

    Raises:
        ValueError: There are more rows than the kernel takes, or a gain with several rows.
    """
    rows, depth = x.shape
    size = weight.shape[0] // (2 if gated else 1)
    if rows > MAX_ROWS:
        raise ValueError(f"few_rows_linear takes at most {MAX_ROWS} rows, not {rows}; use torch.mm for more.")
    if gain is not None and rows > 1:
        raise ValueError("The norm is fused for one row only; normalise several rows with add_rms_norm first.")
    overlap = overlap and not interpreted()
    if overlap and config is None and can_hold(rows, weight):
        return held_linear(x, weight, gated=gated, bias=bias, residual=residual, out=out, overlap=True)
    if out is None:
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    fused = {
        "GATED": gated,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "OVERLAP": overlap,
    }
    if rows == 1:
        rows_config = config if isinstance(config, RowsConfig) else _rows_config(size, depth, gated, overlap)
        _gemv_kernel[(triton.cdiv(size, rows_config.rows),)](
            x,
            gain if gain is not None else x,
            weight,
            bias if bias is not None else x,
            residual if residual is not None else x,
            out,
            size,
            eps,
            DEPTH=depth,
            CHUNK=_chunk(depth),
            ROWS=rows_config.rows,
            EVEN=size % rows_config.rows == 0 and depth % _chunk(depth) == 0,
            NORM=gain is not None,
            **fused,
            **launch_options(rows_config.num_warps, 1, overlap=overlap),
        )
        return out
    dot = config if isinstance(config, DotConfig) else _dot_config(size, depth, gated, split_sums is not None, overlap)
    _dot_kernel[(triton.cdiv(size, dot.block), dot.splits)](
        x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        split_sums.sums if split_sums is not None else x,
        split_sums.locks if split_sums is not None else x,
        rows,
        size,
        depth // dot.splits,
        DEPTH=depth,
        BLOCK=dot.block,
        STEP=dot.step,
        PADDED=MAX_ROWS,
        SPLITS=dot.splits,
        PRECISION=dot_precision(x.dtype),
        **fused,
        **launch_options(dot.num_warps, dot.num_stages, overlap=overlap),
    )
    return out


def _chunk(depth: int) -> int:
    """Columns of a weight row loaded at once: a power of two that divides the row if a large one does."""
    divisor = min(depth & -depth, 4096)
    return divisor if divisor >= 512 else min(triton.next_power_of_2(depth), 4096)


def few_rows_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain-torch :func:`few_rows_linear`, in float64."""
    value = x.double()
    if gain is not None:
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps) * gain.double()
    value = value @ weight.double().t()
    if bias is not None:
        value = value + bias.double()
    if gated:
        gate, up = value.chunk(2, dim=-1)
        value = torch.nn.functional.silu(gate) * up
    if residual is not None:
        value = value + residual.double()
    return value

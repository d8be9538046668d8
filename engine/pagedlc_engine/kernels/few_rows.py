"""Matrix products with a few rows: the weight is read once, at memory speed, and its neighbours are fused in.

One row: a GEMV that holds its weight rows in registers, with the RMSNorm of the input inside. Several rows:
:mod:`streamed_rows`, and for two to eight of them :mod:`held_rows` where the weight is small enough. All end in the
gate (``silu(gate) * up``) or the residual addition. In chains of such kernels the GEMV's and the held weights are
loaded before the wait on the predecessor (programmatic dependent launch).
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
from pagedlc_engine.kernels.launch import can_overlap, launch_options
from pagedlc_engine.kernels.streamed_rows import SplitSums, StreamConfig, streamed_linear

__all__ = ["RowsConfig", "few_rows_linear", "few_rows_linear_reference"]


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
    # Before the sum: behind its barriers the compiler would leave it.
    added = tl.zeros([ROWS], tl.float32)
    if RESIDUAL:
        added = tl.load(residual + row, mask=exists, other=0.0).to(tl.float32)
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
    tl.store(out + row, (total + added).to(out.dtype.element_ty), mask=exists)


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Compile-time choices for one row: outputs a program, and warps."""

    rows: int
    num_warps: int


_ENOUGH_PROGRAMS = 512
# Weights that a large program holds in registers: 128 in each of 256 threads.
_HELD = 32768


def _rows_config(size: int, depth: int, gated: bool, overlap: bool) -> RowsConfig:
    """Small programs finish together; in an overlapped chain over long rows large ones hold more weights before the
    wait on the predecessor."""
    if overlap and depth >= 4096:
        rows, warps = max(1, _HELD // (depth * (2 if gated else 1))), 8
    elif overlap and gated and depth <= 2048:
        rows, warps = 4, 8
    elif overlap and depth <= 1024 and size < 65536:
        rows, warps = 8, 4
    else:
        rows, warps = 4 if depth > 2048 or size >= 65536 else 2, 4
        if depth > 8192:
            rows = 1
    while rows > 1 and size // rows < _ENOUGH_PROGRAMS:
        rows //= 2
    return RowsConfig(1 << (rows.bit_length() - 1), warps)


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
    config: RowsConfig | StreamConfig | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` for one row or some, with what surrounds it.

    Args:
        x: [M, K], contiguous.
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
        ValueError: There is a gain and more than one row, or the config is one for another number of rows.
    """
    rows = len(x)
    if gain is not None and rows > 1:
        raise ValueError("The norm is fused for one row only; normalise several rows with add_rms_norm first.")
    overlap = overlap and can_overlap()
    if overlap and config is None and can_hold(rows, weight):
        return held_linear(x, weight, gated=gated, bias=bias, residual=residual, out=out, overlap=True)
    if rows != 1:
        if isinstance(config, RowsConfig):
            raise ValueError(f"A RowsConfig is for one row, not {rows}; give a StreamConfig.")
        return streamed_linear(
            x, weight, gated=gated, bias=bias, residual=residual, out=out, split_sums=split_sums, overlap=overlap,
            config=config,
        )  # fmt: skip
    if isinstance(config, StreamConfig):
        raise ValueError("A StreamConfig is for several rows, not one; give a RowsConfig.")
    depth, size = x.shape[1], weight.shape[0] // (2 if gated else 1)
    if out is None:
        out = torch.empty((1, size), dtype=x.dtype, device=x.device)
    if config is None:
        config = _rows_config(size, depth, gated, overlap)
    _gemv_kernel[(triton.cdiv(size, config.rows),)](
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
        ROWS=config.rows,
        EVEN=size % config.rows == 0 and depth % _chunk(depth) == 0,
        NORM=gain is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        OVERLAP=overlap,
        **launch_options(config.num_warps, 1, overlap=overlap),
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

"""Matrix products with two to eight rows, whose whole weight lies in registers before the input is there.

In a chain of overlapped launches (programmatic dependent launch) every program loads its part of a small weight while
the kernel before still runs; what remains after the wait is the input, one pass of ``tl.dot`` and the sum. Each
warp takes its own part of K, so the products of a warp are few and the warps' sums meet once. Only for weights that
a card's registers hold at once: a larger one streams better through the pipelined loop of
:mod:`streamed_rows`.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.launch import can_overlap, dot_precision, interpreted, launch_options

__all__ = ["HELD_ROWS", "can_hold", "held_linear"]

HELD_ROWS = 8
_PADDED = 16
_WARPS = 4
_PROGRAMS = 128
_MOST_ELEMENTS = 7 << 20
_MOST_DEPTH = 3072
_LEAST_CHUNK = 64
_LARGEST_CHUNK = 512


@triton.jit
def _all_arrived(value):
    """``value`` itself; behind a barrier nothing of it is used, and stored to shared memory, before all of it is there.
    Otherwise the compiler saves registers by waiting for a few loads at a time."""
    PACK: tl.constexpr = 32 // value.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=PACK
    )  # fmt: skip


@triton.jit
def _held_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    size,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (ceil(size / BLOCK),). CHUNK divides DEPTH and is shared out among PARTS, one a warp. TOGETHER: loads are
    all on their way before the first is waited for."""
    if OVERLAP:
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = DEPTH // CHUNK
    PART: tl.constexpr = CHUNK // PARTS
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    inner = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    start = weight + column.to(tl.int64)[None, None, :] * DEPTH + inner[:, :, None]
    weights = ()
    ups = ()
    for chunk in tl.static_range(CHUNKS):
        at = start + chunk * CHUNK
        weights = weights + (tl.load(at, mask=exists[None, None, :], other=0.0),)  # noqa: RUF005
        if GATED:
            up = tl.load(at + size.to(tl.int64) * DEPTH, mask=exists[None, None, :], other=0.0)
            ups = ups + (up,)  # noqa: RUF005
    held = weights
    held_ups = ups
    if TOGETHER:
        tl.debug_barrier()
        held = ()
        held_ups = ()
        for chunk in tl.static_range(CHUNKS):
            held = held + (_all_arrived(weights[chunk]),)  # noqa: RUF005
            if GATED:
                held_ups = held_ups + (_all_arrived(ups[chunk]),)  # noqa: RUF005
    row = tl.arange(0, PADDED)
    used = row < rows
    source = x + row[None, :, None] * DEPTH + inner[:, None, :]
    target = row[:, None] * size + column[None, :]
    mask = used[:, None] & exists[None, :]
    if OVERLAP:
        gdc_wait()
    added = tl.zeros([PADDED, BLOCK], tl.float32)
    if RESIDUAL:
        added += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    values = ()
    for chunk in tl.static_range(CHUNKS):
        values = values + (tl.load(source + chunk * CHUNK, mask=used[None, :, None], other=0.0),)  # noqa: RUF005
    if TOGETHER:
        tl.debug_barrier()
    acc = tl.zeros([PARTS, PADDED, BLOCK], tl.float32)
    acc_up = tl.zeros([PARTS, PADDED, BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        value = values[chunk]
        if TOGETHER:
            value = _all_arrived(value)
        acc = tl.dot(value, held[chunk], acc, input_precision=PRECISION)
        if GATED:
            acc_up = tl.dot(value, held_ups[chunk], acc_up, input_precision=PRECISION)
    total = tl.sum(acc, 0)
    if BIAS:
        total += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total_up = tl.sum(acc_up, 0)
        if BIAS:
            total_up += tl.load(bias + size + column, mask=exists, other=0.0).to(tl.float32)[None, :]
        total = total / (1.0 + tl.exp(-total)) * total_up
    tl.store(out + target, (total + added).to(out.dtype.element_ty), mask=mask)


def _chunk(depth: int) -> int:
    """The largest power of two that divides ``depth``, up to what a program takes at once."""
    return min(depth & -depth, _LARGEST_CHUNK)


def can_hold(rows: int, weight: torch.Tensor) -> bool:
    """Whether :func:`held_linear` takes so many rows and this weight, and is likely the fastest.

    Args:
        rows: Of the input.
        weight: [N, K], gate and up together if there is a gate.
    """
    depth = weight.shape[1]
    small = weight.numel() <= _MOST_ELEMENTS and depth <= _MOST_DEPTH
    return 1 < rows <= HELD_ROWS and small and _chunk(depth) >= _LEAST_CHUNK


def held_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """``x @ weight.T`` for two to eight rows and a weight that :func:`can_hold`, with what surrounds it.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], contiguous; with ``gated`` [2 N, K], gate then up.
        gated: The result is ``silu(gate) * up``.
        bias: [N], or [2 N] with ``gated``.
        residual: [M, N], added last; may be ``out``.
        out: [M, N], contiguous; allocated when ``None``.
        overlap: Programmatic dependent launch; ``x`` and ``residual`` may come from the kernel before, the rest not.

    Returns:
        ``out``, summed in float32.

    Raises:
        ValueError: There are more rows or longer ones than the kernel takes, or their length divides badly.
    """
    rows, depth = x.shape
    if not can_hold(rows, weight):
        raise ValueError(f"held_linear does not take {rows} rows with a weight {list(weight.shape)}; see can_hold.")
    size = weight.shape[0] // (2 if gated else 1)
    if out is None:
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    overlap = overlap and can_overlap()
    block = next((block for block in (32, 16) if size // block >= _PROGRAMS), 8)
    _held_kernel[(triton.cdiv(size, block),)](
        x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        rows,
        size,
        DEPTH=depth,
        BLOCK=block,
        CHUNK=_chunk(depth),
        PARTS=_WARPS,
        PADDED=_PADDED,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        TOGETHER=block == 8 and not interpreted(),
        PRECISION=dot_precision(x.dtype),
        OVERLAP=overlap,
        **launch_options(_WARPS, 1, overlap=overlap),
    )
    return out

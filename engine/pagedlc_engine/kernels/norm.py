"""RMS normalisation, with the residual addition before it in the same pass."""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.launch import can_overlap, launch_options

__all__ = ["add_rms_norm", "add_rms_norm_reference"]


@triton.jit
def _add_rms_norm_kernel(
    hidden,
    residual,
    weight,
    out,
    hidden_stride,
    eps,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (rows,). The weight is no other kernel's result, so it is read before the wait."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < SIZE
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    value = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * gain
    tl.store(out + row * SIZE + column, value.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Add ``hidden`` to ``residual`` in place and normalise the sum; without a residual, normalise ``hidden``.

    Args:
        hidden: [T, size], contiguous rows.
        residual: [T, size], contiguous; holds the sum afterwards.
        weight: [size].
        eps: Added to the mean square.
        out: [T, size], contiguous; may be ``hidden`` when that is contiguous.
        overlap: Programmatic dependent launch; for chains in which the predecessor is a kernel of this package.

    Returns:
        ``out``: the sum over its root mean square, times ``weight``, computed in float32.
    """
    rows, size = hidden.shape
    if out is None:
        out = torch.empty((rows, size), dtype=hidden.dtype, device=hidden.device)
    overlap = overlap and can_overlap()
    pad = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(rows,)](
        hidden,
        residual if residual is not None else hidden,
        weight,
        out,
        hidden.stride(0),
        eps,
        SIZE=size,
        PAD=pad,
        ADD=residual is not None,
        OVERLAP=overlap,
        **launch_options(min(16, max(1, pad // 512)), 1, overlap=overlap),
    )
    return out


def add_rms_norm_reference(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Plain-torch :func:`add_rms_norm`."""
    if residual is not None:
        residual += hidden
        hidden = residual
    value = hidden.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return (value * weight.float()).to(hidden.dtype)

"""The gate of a feed-forward layer: SiLU of one half times the other."""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.launch import can_overlap, launch_options

__all__ = ["silu_mul", "silu_mul_reference"]


@triton.jit
def _silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (ceil(size / BLOCK), rows)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None, overlap: bool = False) -> torch.Tensor:
    """``silu(gate) * up`` of rows that hold ``gate`` and then ``up``.

    Args:
        gate_up: [T, 2 * size], contiguous.
        out: [T, size], contiguous; allocated when ``None``.
        overlap: Programmatic dependent launch.

    Returns:
        ``out``, computed in float32.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    overlap = overlap and can_overlap()
    block = 1024 if rows < 256 else 2048
    _silu_mul_kernel[(triton.cdiv(size, block), rows)](
        gate_up, out, SIZE=size, BLOCK=block, OVERLAP=overlap, **launch_options(4, 1, overlap=overlap)
    )
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain-torch :func:`silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

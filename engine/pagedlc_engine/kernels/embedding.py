"""Rows of the embedding matrix for token ids that live on the device."""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.launch import can_overlap, launch_options

__all__ = ["embed", "embed_reference"]


@triton.jit
def _embed_kernel(ids, table, out, SIZE: tl.constexpr, PAD: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (tokens,). Successors start only after the wait: theirs may read, before they wait for this kernel, what
    the one before it wrote."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    token = tl.load(ids + row).to(tl.int64)
    value = tl.load(table + token * SIZE + column, mask=column < SIZE)
    tl.store(out + row * SIZE + column, value, mask=column < SIZE)


def embed(
    ids: torch.Tensor, table: torch.Tensor, *, out: torch.Tensor | None = None, overlap: bool = False
) -> torch.Tensor:
    """Gather ``table[ids]``.

    Args:
        ids: Integer [T].
        table: [vocabulary, size], contiguous.
        out: [T, size], contiguous; allocated when ``None``.
        overlap: Programmatic dependent launch.

    Returns:
        ``out``.
    """
    rows, size = ids.shape[0], table.shape[1]
    if out is None:
        out = torch.empty((rows, size), dtype=table.dtype, device=table.device)
    overlap = overlap and can_overlap()
    _embed_kernel[(rows,)](
        ids,
        table,
        out,
        SIZE=size,
        PAD=triton.next_power_of_2(size),
        OVERLAP=overlap,
        **launch_options(4, 1, overlap=overlap),
    )
    return out


def embed_reference(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Plain-torch :func:`embed`."""
    return table[ids.long()]

"""Matrix products with two to some hundred rows: the weight streams through shared memory, its neighbours fused in.

A program takes some outputs and a share of K. The bulk copy engine fetches whole tiles of weight and input, several
steps ahead, so that nothing but waiting stands between memory and the tensor cores. Where outputs are few, K is split
between programs, and the last one of a block to arrive adds their sums up, always in the same order. In a chain of
overlapped launches (programmatic dependent launch) no time passes between such a kernel and its neighbours, which is
most of what it gains over cuBLAS; that it needs no launch of its own for the gate or for adding up is the rest.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pagedlc_engine.kernels.launch import Card, can_copy_in_bulk, can_overlap, card_of, dot_precision, launch_options

__all__ = [
    "SplitSums",
    "StreamConfig",
    "choose_stream_config",
    "prefers_streaming",
    "streamed_linear",
]

_MOST_TILE_ROWS = 128
# Elements of the largest weights with which 65 to 128 rows, and with a gate 129 to 256 rows, are faster here.
_MIDDLE_WEIGHT = 17 << 20
_SMALL_WEIGHT = 8 << 20
_LEAST_ROWS = 16
_MOST_SPLITS = 8
_MOST_SUMS = 2 << 20
_LOCKS = 8192
# Deeper pipelines than these were slower.
_GATED_STAGES = 4
_WIDE_STAGES = 6
_MOST_STAGES = 8
# Shared memory left to the kernels before and after, whose programs start before this one's have ended.
_SPARE_BYTES = 32 << 10


@triton.jit(do_not_specialize=["rows"])
def _streamed_kernel(
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
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (ceil(size / BLOCK), SPLITS, ceil(rows / PADDED)). ``share`` = DEPTH / SPLITS is an argument so that the
    compiler sees its divisibility. BULK: ``x`` and ``weight`` are descriptors, for which what lies outside is zero."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    top = tl.program_id(2) * PADDED
    begin = split * share
    column = block * BLOCK + tl.arange(0, BLOCK)
    row = top + tl.arange(0, PADDED)
    step = tl.arange(0, STEP)
    exists = column < size
    used = row < rows
    target = row[:, None] * size + column[None, :]
    mask = used[:, None] & exists[None, :]
    at = weight
    source = x
    if not BULK:
        at = weight + column.to(tl.int64)[None, :] * DEPTH + (begin + step)[:, None]
        source = x + row[:, None] * DEPTH + (begin + step)[None, :]
    if OVERLAP:
        gdc_wait()
    added = tl.zeros([PADDED, BLOCK], tl.float32)
    if RESIDUAL:
        added = tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([PADDED, BLOCK], tl.float32)
    acc_up = tl.zeros([PADDED, BLOCK], tl.float32)
    for start in range(0, share, STEP):
        if BULK:
            value = x.load([top, begin + start])
            acc = tl.dot(value, tl.trans(weight.load([block * BLOCK, begin + start])), acc, input_precision=PRECISION)
            if GATED:
                up = weight.load([size + block * BLOCK, begin + start])
                acc_up = tl.dot(value, tl.trans(up), acc_up, input_precision=PRECISION)
        else:
            inside = start + step < share
            value = tl.load(source + start, mask=used[:, None] & inside[None, :], other=0.0)
            there = exists[None, :] & inside[:, None]
            acc = tl.dot(value, tl.load(at + start, mask=there, other=0.0), acc, input_precision=PRECISION)
            if GATED:
                up = tl.load(at + size.to(tl.int64) * DEPTH + start, mask=there, other=0.0)
                acc_up = tl.dot(value, up, acc_up, input_precision=PRECISION)
    if OVERLAP:  # triggered earlier, the successor's programs would take the place of this kernel's own
        gdc_launch_dependents()
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
        tl.store(out + target, (acc + added).to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Compile-time choices of one launch.

    Args:
        block: Outputs a program; with a gate it computes as many gates and as many ups.
        step: Columns of K a step.
        splits: Programs that share K; 1 with a gate.
        num_stages: Steps that are fetched ahead.
        num_warps: Warps a program.
    """

    block: int
    step: int
    splits: int
    num_stages: int
    num_warps: int


class SplitSums:
    """Memory through which programs that share a sum meet; one serves all products of a step in turn, and its locks the
    splits of attention.

    Args:
        device: A CUDA device, or a CPU with Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.empty(_MOST_SUMS, dtype=torch.float32, device=device)
        self.locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)

    @staticmethod
    def holds(splits: int, rows: int, size: int, block: int) -> bool:
        """Whether there is room for a product's partial sums, and a lock for each of its blocks."""
        return splits * rows * size <= _MOST_SUMS and size <= _LOCKS * block


def choose_stream_config(
    rows: int, size: int, depth: int, gated: bool, itemsize: int, can_split: bool, card: Card
) -> StreamConfig:
    """The decision rule; the figures behind it are in benchmarks/NOTES.md.

    Programs should about fill the card, once or twice, with as many tiles on their way as its shared memory takes.

    Args:
        rows: Rows of the input.
        size: Outputs.
        depth: K.
        gated: Whether each output is a gate and an up.
        itemsize: Bytes of a weight.
        can_split: Whether there is memory for splitting K.
        card: The device.
    """
    padded = _padded(rows)
    few = padded == _LEAST_ROWS
    processors = card.num_processors
    enough = processors * 8 // 11  # programs that about fill the card: 96 of 132
    step = 128 if itemsize < 4 else 64
    can_split = can_split and not gated and rows <= padded
    if few:
        block = 64 if can_split or size >= 65536 else 32
    elif gated and rows > padded:
        block, step = 64, step // 2
    elif gated:
        block = next((block for block in (128, 64) if size // block >= enough), 32)
        step //= 2 if block > 32 else 1
    else:
        block = 64 if size // 64 >= enough or (can_split and depth >= 8192 and size // 32 >= enough) else 32
    splits = 1

    def too_few(programs: int) -> bool:
        if few:
            return programs < 128 or (programs < 192 and depth // splits > 1024)
        return programs < (enough if block == 64 else 128) and depth // splits > 1024

    while (
        can_split
        and too_few(size // block * splits)
        and splits < _MOST_SPLITS
        and depth % (2 * splits * step) == 0
        and SplitSums.holds(2 * splits, rows, size, block)
    ):
        splits *= 2
    tile = (padded + block * (2 if gated else 1)) * step * itemsize
    programs = -(-size // block) * splits * -(-rows // padded)
    room = (card.shared_bytes - _SPARE_BYTES) // (1 if programs <= processors else 2)
    most_stages = _GATED_STAGES if gated else _WIDE_STAGES if block == 64 else _MOST_STAGES
    stages = min(most_stages, room // tile, max(4, depth // splits // step * 3 // 4))
    sums = padded * block * (2 if gated else 1)
    return StreamConfig(block, step, splits, max(2, stages), num_warps=8 if sums > 16384 else 4)


def prefers_streaming(rows: int, size: int, depth: int, gated: bool) -> bool:
    """Whether a 16-bit product with so many rows is faster here than in cuBLAS; see benchmarks/NOTES.md.

    Args:
        rows: Rows of the input.
        size: Outputs.
        depth: K.
        gated: Whether each output is a gate and an up.
    """
    weight = size * depth * (2 if gated else 1)
    if rows > 128:
        return rows <= 256 and gated and weight <= _SMALL_WEIGHT
    if rows > 64:
        return gated or weight <= _MIDDLE_WEIGHT
    if 16 < rows <= 32:  # where cuBLAS needs a second kernel
        return gated or depth >= 3 * size
    return rows > 0


def _padded(rows: int) -> int:
    return min(_MOST_TILE_ROWS, max(_LEAST_ROWS, 1 << (rows - 1).bit_length()))


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the bulk copy engine takes it."""
    return tensor.data_ptr() % 16 == 0 and tensor.shape[1] * tensor.element_size() % 16 == 0


def streamed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    split_sums: SplitSums | None = None,
    overlap: bool = False,
    config: StreamConfig | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` for some rows, with what surrounds it; slower than cuBLAS where there are many.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], contiguous; with ``gated`` [2 N, K], gate then up.
        gated: The result is ``silu(gate) * up``.
        bias: [N], or [2 N] with ``gated``.
        residual: [M, N], added last; may be ``out``.
        out: [M, N], contiguous; allocated when ``None``.
        split_sums: Memory for splitting K; ``None`` does not split.
        overlap: Programmatic dependent launch; ``x`` and ``residual`` may come from the kernel before, the rest not.
        config: Compile-time choices instead of :func:`choose_stream_config`'s.

    Returns:
        ``out``, summed in float32.

    Raises:
        ValueError: ``config`` splits K where that is not possible.
    """
    rows, depth = x.shape
    size = weight.shape[0] // (2 if gated else 1)
    if out is None:
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    if config is None:
        config = choose_stream_config(
            rows, size, depth, gated, x.element_size(), split_sums is not None, card_of(x.device)
        )
    padded = _padded(rows)
    if config.splits > 1 and (split_sums is None or gated or rows > padded or depth % (config.splits * config.step)):
        raise ValueError(
            f"K of {depth} cannot be split by {config}: that takes split_sums, at most {_MOST_TILE_ROWS} rows, no "
            "gate, and shares of whole steps."
        )
    bulk = can_copy_in_bulk() and _is_aligned(x) and _is_aligned(weight)
    source: torch.Tensor | TensorDescriptor = x
    streamed: torch.Tensor | TensorDescriptor = weight
    if bulk:
        source = TensorDescriptor.from_tensor(x, [padded, config.step])
        streamed = TensorDescriptor.from_tensor(weight, [config.block, config.step])
    overlap = overlap and can_overlap()
    _streamed_kernel[(triton.cdiv(size, config.block), config.splits, triton.cdiv(rows, padded))](
        source,
        streamed,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        split_sums.sums if split_sums is not None else x,
        split_sums.locks if split_sums is not None else x,
        rows,
        size,
        depth // config.splits,
        DEPTH=depth,
        BLOCK=config.block,
        STEP=config.step,
        PADDED=padded,
        SPLITS=config.splits,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BULK=bulk,
        PRECISION=dot_precision(x.dtype),
        OVERLAP=overlap,
        **launch_options(config.num_warps, config.num_stages, overlap=overlap),
    )
    return out

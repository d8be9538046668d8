"""Decoding in one kernel: query/key norm, rotation, cache write, attention and the merge of its splits.

One new token a request; the newest key and value are used from registers, all older ones from the cache, so nothing
waits for the cache write. The last split of a tile and KV head to arrive merges them all, so that the next kernel
of an overlapped chain follows at once and loads its weights meanwhile.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.attention_kernels import attend_keys, load_keys, softmax_step
from pagedlc_engine.kernels.attention_plan import AttentionPlan
from pagedlc_engine.kernels.launch import LOG2_E, can_overlap, dot_precision, launch_options
from pagedlc_engine.kernels.paged_attention import FEW_PROGRAMS
from pagedlc_engine.kernels.paged_attention_reference import paged_attention_reference
from pagedlc_engine.kernels.rope_cache import norm_rope_cache_reference

__all__ = [
    "DecodeConfig",
    "can_fuse_decode",
    "choose_decode_config",
    "fused_decode",
    "fused_decode_reference",
    "prefers_fused_decode",
]

# Launches with splits that measured faster than rotation, attention and merge apart.
_MOST_SPLIT_PROGRAMS = 400
# One compiled merge serves all launches of so many splits and fewer.
_LEAST_PARTS = 16
# Elements of intermediate results that a program merges at once: 64 in each thread of four warps, 128 of two.
_MERGED_AT_ONCE = 8192


@triton.jit
def _rotated(heads, dims, pair, inside, gain, gain_pair, cos, sin, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Heads [rows, dims] normalised and rotated; ``pair`` is where the other element of each pair lies."""
    value = tl.load(heads + dims, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(heads + pair, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
        value = value * scale * gain.to(tl.float32)
        other = other * scale * gain_pair.to(tl.float32)
    return value * cos + other * sin


@triton.jit
def _merge(
    out,
    partial_out,
    partial_lse,
    first,
    parts,
    token,
    head,
    stop_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge the splits of MERGED heads from ``head`` on, below ``stop_head``, by log-sum-exp; their results begin at
    row ``first``. As one tile, so that they wait for memory and for one another's lanes once."""
    part = tl.arange(0, PARTS)
    heads = head + tl.arange(0, MERGED)
    dims = tl.arange(0, HEAD_PAD)
    exists = heads < stop_head
    live = (part < parts)[:, None] & exists[None, :]
    where = (first + part).to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
    lse = tl.load(partial_lse + where, mask=live, other=float("-inf"), cache_modifier=".cg")
    inside = live[:, :, None] & (dims < HEAD_DIM)[None, None, :]
    rows = partial_out + where[:, :, None] * HEAD_DIM + dims[None, None, :]
    partial = tl.load(rows, mask=inside, other=0.0, cache_modifier=".cg")
    peak = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(exists, peak, 0.0)[None, :])
    total = tl.where(exists, tl.sum(weight, 0), 1.0)
    merged = tl.sum(partial * weight[:, :, None], 0) / total[:, None]
    target = out + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=exists[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["table_stride", "window"])
def _fused_decode_kernel(
    projected,
    query_gain,
    key_gain,
    rotation,
    key_cache,
    value_cache,
    out,
    block_tables,
    records,
    partial_out,
    partial_lse,
    locks,
    scale,
    eps,
    table_stride,
    row_stride,
    window,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    MERGED: tl.constexpr,
    NORM: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
    GUARDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (kv heads, tiles, splits). PARTS: power of two not below the number of splits. MERGED: heads that are merged
    at once; a power of two. HELD: a split's first keys
    are loaded before the wait for the projection, since no kernel of the step but this one writes to the cache."""
    if OVERLAP:
        gdc_launch_dependents()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    record = records + tl.program_id(1) * 8
    table = block_tables + tl.load(record).to(tl.int64) * table_stride
    token = tl.load(record + 1).to(tl.int64)
    count = tl.load(record + 2)
    position = tl.load(record + 3)
    chunk = tl.load(record + 5)
    partial_base = tl.load(record + 7)
    begin = 0
    if WINDOWED:
        begin += tl.maximum(position - window + 1, 0) // KEYS * KEYS
    start = begin + split * chunk
    if (count == 0) | (start > position):
        if OVERLAP:
            gdc_wait()
        return
    stop = tl.minimum(position + 1, start + chunk)
    old = tl.minimum(stop, position)
    # Whole tiles, of which most rows say the same, have one layout; vectors would each be moved between the warps.
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)
    in_head = (dims < HEAD_DIM)[None, :]
    every = tl.broadcast_to(dims[None, :], (ROWS, HEAD_PAD))
    # Element d pairs with d + HALF or d - HALF; its sine is negative in the first half.
    pair = tl.where(every < HALF, every + HALF, every - HALF)
    real = every < HEAD_DIM
    angle = rotation + position * HEAD_DIM + tl.where(every < HALF, every, every - HALF)
    cos = tl.load(angle, mask=real, other=0.0)
    sin = tl.load(angle + HALF, mask=real, other=0.0)
    sin = tl.where(every < HALF, -sin, sin)
    gain_q = tl.load(query_gain + every, mask=real, other=0.0)
    gain_q_pair = tl.load(query_gain + pair, mask=real, other=0.0)
    gain_k = tl.load(key_gain + every, mask=real, other=0.0)
    gain_k_pair = tl.load(key_gain + pair, mask=real, other=0.0)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    slot = (block * BLOCK_SIZE + position % BLOCK_SIZE) * WIDTH + kv_head * HEAD_DIM
    k, v = load_keys(
        key_cache, value_cache, table, kv_head, start, old,
        HEAD_DIM, HEAD_PAD, WIDTH, BLOCK_SIZE, KEYS, True, False,
    )  # fmt: skip
    if OVERLAP:
        gdc_wait()

    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & in_head
    heads = projected + token * row_stride + head[:, None] * HEAD_DIM
    q = _rotated(heads, every, pair, inside, gain_q, gain_q_pair, cos, sin, eps, HEAD_DIM, NORM)
    q = q.to(out.dtype.element_ty)
    # The newest key and value come from registers; only the split that ends with them counts and stores them.
    source = projected + token * row_stride + (NUM_HEADS + kv_head) * HEAD_DIM
    new_k = _rotated(source, every, pair, real, gain_k, gain_k_pair, cos, sin, eps, HEAD_DIM, NORM)
    new_k = new_k.to(key_cache.dtype.element_ty)
    new_v = tl.load(source + WIDTH + every, mask=real, other=0.0)
    newest = (tl.zeros([ROWS], tl.int32) + stop) > position
    stored = real & (newest & (row == 0))[:, None]
    tl.store(key_cache + slot + every, new_k, mask=stored)
    tl.store(value_cache + slot + every, new_v, mask=stored)
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    peak = tl.where(newest, score, float("-inf"))
    total = tl.where(newest, 1.0, 0.0)
    acc = tl.where(newest[:, None], new_v.to(tl.float32), 0.0)
    positions = tl.zeros([ROWS], tl.int32) + position
    first = start
    if HELD:
        acc, total, peak = softmax_step(
            acc, total, peak, q, k, v, first, old, positions, scale, 0.0, window, KEYS, True, WINDOWED, False, PRECISION
        )
        first += KEYS
    if not GUARDED or first < old:
        for at in tl.range(first, old, KEYS):
            acc, total, peak = attend_keys(
                acc, total, peak, q, key_cache, value_cache, table, kv_head, at, old, positions, scale, 0.0, window,
                HEAD_DIM, HEAD_PAD, WIDTH, BLOCK_SIZE, KEYS, True, WINDOWED, False, False, PRECISION,
            )  # fmt: skip
    safe_total = tl.where(total > 0.0, total, 1.0)
    acc = acc / safe_total[:, None]
    parts = tl.cdiv(position + 1 - begin, chunk)
    whole = True
    if PARTS > 1:
        whole = parts == 1
    if whole:
        target = out + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        lse = tl.where(total > 0.0, peak + tl.log2(safe_total), float("-inf"))
        where = (partial_base + split).to(tl.int64) * NUM_HEADS + head
        tl.store(partial_lse + where, lse, mask=row < GROUP)
        tl.store(partial_out + where[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
        tl.debug_barrier()
        lock = locks + tl.program_id(1) * NUM_KV_HEADS + kv_head
        if tl.atomic_add(lock, 1, sem="acq_rel") == parts - 1:
            for member in tl.static_range(0, GROUP, MERGED):
                _merge(
                    out, partial_out, partial_lse, partial_base, parts, token, kv_head * GROUP + member,
                    kv_head * GROUP + GROUP, NUM_HEADS, HEAD_DIM, HEAD_PAD, PARTS, MERGED,
                )  # fmt: skip
            tl.store(lock, 0)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Compile-time choices of one launch.

    Args:
        keys: Keys a step of the inner loop; a power of two.
        num_warps: Warps a program.
        num_stages: Depth of the load pipeline.
        held: Load the first keys before the wait for the projection; takes registers from other programs.
        guarded: Leave the loop over the other keys out where there are none, its pipeline's start included.
    """

    keys: int
    num_warps: int
    num_stages: int
    held: bool
    guarded: bool = False


def choose_decode_config(head_dim: int, dtype: torch.dtype, tiles: int, splits: int, programs: int) -> DecodeConfig:
    """The decision rule; the figures behind it are in benchmarks/NOTES.md.

    Args:
        head_dim: Elements a head.
        dtype: Type of the projection and the cache.
        tiles: Requests.
        splits: Programs along a request's keys.
        programs: Programs of the launch.
    """
    if dtype == torch.float32:
        return DecodeConfig(keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2, held=False)
    if head_dim > 128:
        return DecodeConfig(keys=32, num_warps=4, num_stages=3, held=False)
    if splits > 2 and programs <= FEW_PROGRAMS:
        return DecodeConfig(keys=64, num_warps=4 if tiles == 1 else 2, num_stages=3, held=True, guarded=True)
    return DecodeConfig(keys=32, num_warps=2, num_stages=5, held=False)


def prefers_fused_decode(tiles: int, splits: int, num_kv_heads: int) -> bool:
    """Whether a launch of this size is faster in one kernel than in three; see benchmarks/NOTES.md.

    Args:
        tiles: Requests.
        splits: Programs along a request's keys.
        num_kv_heads: Key and value heads.
    """
    return splits == 1 or tiles * splits * num_kv_heads <= _MOST_SPLIT_PROGRAMS


def can_fuse_decode(plan: AttentionPlan) -> bool:
    """Whether every request of the step has one new token and none shares a prefix pass."""
    return plan.shared is None and len(plan.tables) == 1 and int(plan.query_lens.max()) == 1


def fused_decode(
    projected: torch.Tensor,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    num_heads: int,
    *,
    scale: float,
    eps: float = 1e-6,
    window: int | None = None,
    locks: torch.Tensor,
    out: torch.Tensor | None = None,
    overlap: bool = False,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """From the projection of one new token a request to its attention; keys and values are stored on the way.

    Two requests must not read, in this step, a block that another one writes: that needs the cache written first.

    Args:
        projected: [T, (heads + 2 * kv_heads) * head_dim]: queries, keys, values.
        query_gain: [head_dim] RMS norm weight of queries, or ``None``.
        key_gain: [head_dim] RMS norm weight of keys; ``None`` with ``query_gain``.
        rotation: float32 [positions, head_dim]: cosines of a position, then its sines.
        key_cache: [blocks, block_size, kv_heads, head_dim], contiguous.
        value_cache: Like ``key_cache``.
        plan: The step; see :func:`can_fuse_decode`.
        num_heads: Query heads.
        scale: Factor on the scores.
        eps: Added to the mean square.
        window: Keys a query sees, its own included; ``None`` for all.
        locks: int32 [tiles * kv_heads] zeros, at which splits meet; zeros again afterwards.
        out: [T, heads, head_dim], contiguous; allocated when ``None``.
        overlap: Programmatic dependent launch.
        config: Compile-time choices instead of :func:`choose_decode_config`'s.

    Returns:
        ``out``.

    Raises:
        ValueError: There are too few locks.
    """
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    (table,) = plan.tables
    if out is None:
        out = torch.empty((len(projected), num_heads, head_dim), dtype=projected.dtype, device=projected.device)
    partial_out = torch.empty((plan.partial_rows, num_heads, head_dim), dtype=torch.float32, device=out.device)
    partial_lse = torch.empty((plan.partial_rows, num_heads), dtype=torch.float32, device=out.device)
    overlap = overlap and can_overlap()
    tiles = len(table.records)
    if config is None:
        programs = tiles * table.splits * num_kv_heads
        config = choose_decode_config(head_dim, projected.dtype, tiles, table.splits, programs)
    if table.splits > 1 and locks.numel() < tiles * num_kv_heads:
        raise ValueError(f"{tiles} tiles of {num_kv_heads} heads need as many locks, not {locks.numel()}.")
    head_pad = triton.next_power_of_2(head_dim)
    parts = 1 if table.splits == 1 else max(_LEAST_PARTS, triton.next_power_of_2(table.splits))
    group = num_heads // num_kv_heads
    merged = max(1, min(triton.next_power_of_2(group), _MERGED_AT_ONCE // (parts * head_pad)))
    _fused_decode_kernel[(num_kv_heads, tiles, table.splits)](
        projected,
        query_gain if query_gain is not None else rotation,
        key_gain if key_gain is not None else rotation,
        rotation,
        key_cache,
        value_cache,
        out,
        plan.block_tables,
        table.records,
        partial_out,
        partial_lse,
        locks,
        scale * LOG2_E,
        eps,
        plan.block_tables.stride(0),
        projected.stride(0),
        window or 0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        ROWS=table.rows,
        KEYS=config.keys,
        PARTS=parts,
        MERGED=merged,
        NORM=query_gain is not None,
        WINDOWED=window is not None,
        PRECISION=dot_precision(projected.dtype),
        HELD=config.held,
        GUARDED=config.guarded,
        OVERLAP=overlap,
        **launch_options(config.num_warps, config.num_stages, overlap=overlap),
    )
    return out


def fused_decode_reference(
    projected: torch.Tensor,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    num_heads: int,
    *,
    scale: float,
    eps: float = 1e-6,
    window: int | None = None,
) -> torch.Tensor:
    """Plain-torch :func:`fused_decode`."""
    positions = torch.as_tensor(plan.context_lens, device=projected.device) - 1
    query = norm_rope_cache_reference(
        projected, query_gain, key_gain, rotation, positions, plan.slots, key_cache, value_cache, num_heads, eps
    )
    return paged_attention_reference(query, key_cache, value_cache, plan, scale=scale, window=window)

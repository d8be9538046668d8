"""Decoding in one pass over the projection: query/key norm, rotation, cache write and attention.

For small batches, where kernel boundaries cost as much as the arithmetic; measured, it is worth a few percent at eight
requests and nothing at one or two (benchmarks/NOTES.md). One new token a request; the newest key and
value are used from registers, all older ones from the cache, so nothing waits for the cache write. Results of splits
are merged as in :mod:`paged_attention`.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.attention_kernels import attend_keys, load_keys, merge_kernel, softmax_step
from pagedlc_engine.kernels.attention_plan import AttentionPlan
from pagedlc_engine.kernels.launch import LOG2_E, dot_precision, interpreted, launch_options
from pagedlc_engine.kernels.paged_attention import choose_config
from pagedlc_engine.kernels.paged_attention_reference import paged_attention_reference
from pagedlc_engine.kernels.rope_cache import norm_rope_cache_reference

__all__ = ["can_fuse_decode", "fused_decode", "fused_decode_reference"]


@triton.jit
def _rotated(source, partner, inside, gain, gain_partner, cos, sin, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Heads [rows, dims] normalised and rotated; ``partner`` is where the other element of each pair lies."""
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
        value = value * scale * gain[None, :]
        other = other * scale * gain_partner[None, :]
    return value * cos[None, :] + other * sin[None, :]


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
    NORM: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (kv heads, tiles, splits)."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
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
    stop = tl.minimum(position + 1, start + chunk)
    dims = tl.arange(0, HEAD_PAD)
    in_head = dims < HEAD_DIM
    # Element d pairs with d + HALF or d - HALF; its sine is negative in the first half.
    pair = tl.where(dims < HALF, dims + HALF, dims - HALF)
    angle = rotation + position * HEAD_DIM + tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(angle, mask=in_head, other=0.0)
    sin = tl.load(angle + HALF, mask=in_head, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    gain_q = tl.load(query_gain + dims, mask=in_head, other=0.0).to(tl.float32)
    gain_q_pair = tl.load(query_gain + pair, mask=in_head, other=0.0).to(tl.float32)
    gain_k = tl.load(key_gain + dims, mask=in_head, other=0.0).to(tl.float32)
    gain_k_pair = tl.load(key_gain + pair, mask=in_head, other=0.0).to(tl.float32)
    # Older keys are no result of the kernel before: the first tile is on its way while that one still runs.
    old = tl.minimum(stop, position)
    k, v = load_keys(
        key_cache, value_cache, table, kv_head, tl.minimum(start, position), old,
        HEAD_DIM, HEAD_PAD, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE, KEYS, True, False,
    )  # fmt: skip
    if EARLY:
        gdc_wait()
    if (count == 0) | (start > position):
        return

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & in_head[None, :]
    heads = projected + token * row_stride + head[:, None] * HEAD_DIM
    q = _rotated(
        heads + dims[None, :], heads + pair[None, :], inside, gain_q, gain_q_pair, cos, sin, eps, HEAD_DIM, NORM
    ).to(out.dtype.element_ty)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    positions = tl.zeros([ROWS], tl.int32) + position
    acc, total, peak = softmax_step(
        acc, total, peak, q, k, v, start, old, positions, scale, 0.0, window, KEYS, True, WINDOWED, False, PRECISION
    )
    for first in tl.range(start + KEYS, old, KEYS):
        acc, total, peak = attend_keys(
            acc, total, peak, q, key_cache, value_cache, table, kv_head, first, old, positions, scale, 0.0, window,
            HEAD_DIM, HEAD_PAD, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE, KEYS, True, WINDOWED, False, False, PRECISION,
        )  # fmt: skip
    if stop > position:
        one = tl.arange(0, 1)
        source = projected + token * row_stride + (NUM_HEADS + kv_head + one[:, None]) * HEAD_DIM
        here = (one[:, None] == 0) & in_head[None, :]
        new_k = _rotated(
            source + dims[None, :], source + pair[None, :], here, gain_k, gain_k_pair, cos, sin, eps, HEAD_DIM, NORM
        ).to(key_cache.dtype.element_ty)
        new_v = tl.load(source + NUM_KV_HEADS * HEAD_DIM + dims[None, :], mask=here, other=0.0)
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        slot = (block * BLOCK_SIZE + position % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        tl.store(key_cache + slot + dims[None, :] + one[:, None], new_k, mask=here)
        tl.store(value_cache + slot + dims[None, :] + one[:, None], new_v, mask=here)
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
        new_peak = tl.maximum(peak, score)
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * new_v.to(tl.float32)
        peak = new_peak
    if OVERLAP:
        gdc_launch_dependents()
    acc = acc / total[:, None]
    if position + 1 - begin <= chunk:
        target = out + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        where = (partial_base + split).to(tl.int64) * NUM_HEADS + head
        tl.store(partial_lse + where, peak + tl.log2(total), mask=row < GROUP)
        tl.store(partial_out + where[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)


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
    out: torch.Tensor | None = None,
    overlap: bool = False,
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
        out: [T, heads, head_dim], contiguous; allocated when ``None``.
        overlap: Programmatic dependent launch.

    Returns:
        ``out``.
    """
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    (table,) = plan.tables
    if out is None:
        out = torch.empty((len(projected), num_heads, head_dim), dtype=projected.dtype, device=projected.device)
    partial_out = torch.empty((plan.partial_rows, num_heads, head_dim), dtype=torch.float32, device=out.device)
    partial_lse = torch.empty((plan.partial_rows, num_heads), dtype=torch.float32, device=out.device)
    programs = len(table.records) * table.splits * num_kv_heads
    config = choose_config(table.rows, head_dim, block_size, projected.dtype, programs)
    compiled = not interpreted()
    early = overlap and compiled
    head_pad = triton.next_power_of_2(head_dim)
    _fused_decode_kernel[(num_kv_heads, len(table.records), table.splits)](
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
        NORM=query_gain is not None,
        WINDOWED=window is not None,
        PRECISION=dot_precision(projected.dtype),
        OVERLAP=compiled,
        EARLY=early,
        **launch_options(config.num_warps, config.num_stages, overlap=early),
    )
    if table.splits > 1:
        merge_kernel[(num_heads, len(table.records), 1)](
            out,
            table.records,
            partial_out,
            partial_lse,
            window or 0,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_PAD=head_pad,
            KEYS=config.keys,
            PARTS=triton.next_power_of_2(table.splits),
            WINDOWED=window is not None,
            OVERLAP=compiled,
            **launch_options(4, 1, overlap=compiled),
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

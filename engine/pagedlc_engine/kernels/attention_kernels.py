"""Attention of ragged queries over a paged KV cache, and over a prefix that several requests share.

One kernel serves prompts, decoding and mixed batches: a program takes one tile of :mod:`attention_plan`, one KV head
and one split of the tile's keys, with all query heads of the KV head packed into the rows of the tile.

* Online softmax over tiles of keys, in base 2 (FlashAttention-2, arXiv 2307.08691).
* Split-KV with a second reduction for long contexts and small batches (FlashDecoding).
* Shared prefix: all queries over the prefix as one tile, each request's own keys afterwards, merged by log-sum-exp
  (Hydragen, arXiv 2402.05099; FlashInfer's cascade, arXiv 2501.01005).

Keys and values lie apart, each [blocks, block_size, kv_heads, head_dim]: a token's heads are contiguous, so that cache
writes are, and a block is a plain matrix that the bulk copy engine fetches as one tile. A head-major layout measured
within 1.5% for decoding.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["attend_keys", "attention_kernel", "load_keys", "merge_kernel", "softmax_step"]


@triton.jit
def load_keys(
    keys,
    values,
    block_table,
    kv_head,
    first,
    stop,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    BULK: tl.constexpr,
):
    """KEYS keys and values from ``first`` on, each [KEYS, HEAD_PAD]. Masked, those from ``stop`` on are zeros: what
    lies in the cache there is nobody's, and may be NaN."""
    token = first + tl.arange(0, KEYS)
    dims = tl.arange(0, HEAD_PAD)
    if BULK:
        slot = tl.load(block_table + first // BLOCK_SIZE) * BLOCK_SIZE + first % BLOCK_SIZE
        k = keys.load([slot, kv_head * HEAD_DIM])
        v = values.load([slot, kv_head * HEAD_DIM])
        if MASKED:
            v = tl.where((token < stop)[:, None], v, 0.0)
    else:
        if BLOCK_SIZE % KEYS == 0:
            block = tl.load(block_table + first // BLOCK_SIZE)
            slots = block.to(tl.int64) * BLOCK_SIZE + (first % BLOCK_SIZE + tl.arange(0, KEYS))
        elif MASKED:
            block = tl.load(block_table + token // BLOCK_SIZE, mask=token < stop, other=0)
            slots = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        else:
            block = tl.load(block_table + token // BLOCK_SIZE)
            slots = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        offsets = (slots * TOKEN_STRIDE + kv_head * HEAD_DIM)[:, None] + dims[None, :]
        if MASKED:
            inside = (token < stop)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + offsets, mask=inside, other=0.0)
            v = tl.load(values + offsets, mask=inside, other=0.0)
        elif HEAD_PAD != HEAD_DIM:
            k = tl.load(keys + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(values + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(keys + offsets)
            v = tl.load(values + offsets)
    return k, v


@triton.jit
def softmax_step(
    acc,
    total,
    peak,
    query,
    k,
    v,
    first,
    stop,
    positions,
    scale,
    soft_cap,
    window,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax. A masked step hides keys from ``stop`` on and those that a query's position
    does not allow."""
    token = first + tl.arange(0, KEYS)
    score = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    if CAPPED:  # scale holds scale / cap, soft_cap holds cap * log2(e)
        score = (1.0 - 2.0 / (tl.exp(score * (2.0 * scale)) + 1.0)) * soft_cap
    if MASKED:
        visible = (token[None, :] <= positions[:, None]) & (token < stop)[None, :]
        if WINDOWED:
            visible = visible & (token[None, :] > positions[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
    if CAPPED:
        new_peak = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - base[:, None])
    else:
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score * scale - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def attend_keys(
    acc,
    total,
    peak,
    query,
    keys,
    values,
    block_table,
    kv_head,
    first,
    stop,
    positions,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Load KEYS keys and values and take one step of the softmax over them."""
    k, v = load_keys(
        keys, values, block_table, kv_head, first, stop,
        HEAD_DIM, HEAD_PAD, TOKEN_STRIDE, BLOCK_SIZE, KEYS, MASKED, BULK,
    )  # fmt: skip
    return softmax_step(
        acc, total, peak, query, k, v, first, stop, positions, scale, soft_cap, window,
        KEYS, MASKED, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "window"])
def attention_kernel(
    query,
    keys,
    values,
    out,
    block_tables,
    records,
    members,
    partial_out,
    partial_lse,
    scale,
    soft_cap,
    table_stride,
    query_stride,
    window,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARED: tl.constexpr,
    AFTER_PREFIX: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    BULK: tl.constexpr,
    TWO_PHASES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (kv heads, tiles, splits). SHARED: the prefix pass, whose queries come from the member list and all see
    every key; results always go to the partial buffers. EARLY: the launch may overlap its predecessor, whose results
    may be anything but the tile records."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    record = records + tl.program_id(1) * 8
    count = tl.load(record + 2)
    if EARLY:
        gdc_wait()
    if OVERLAP and SHARED:
        gdc_launch_dependents()
    if count == 0:
        if OVERLAP and AFTER_PREFIX:
            gdc_wait()
        return
    table = block_tables + tl.load(record).to(tl.int64) * table_stride
    first_token = tl.load(record + 1)
    position = tl.load(record + 3)
    begin = tl.load(record + 4)
    chunk = tl.load(record + 5)
    prefix_splits = tl.load(record + 6)
    partial_base = tl.load(record + 7)

    end = position + (1 if SHARED else count)
    if WINDOWED:
        begin += tl.maximum(position - window + 1 - begin, 0) // KEYS * KEYS
    start = begin
    stop = end
    if SPLIT:
        start = begin + split * chunk
        stop = tl.minimum(end, start + chunk)
        if start >= end:
            if OVERLAP and AFTER_PREFIX:
                gdc_wait()
            return

    row = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)
    local = row // GROUP
    live = local < count
    head = kv_head * GROUP + row % GROUP
    if SHARED:
        token = tl.load(members + (first_token + local) * 3, mask=live, other=0)
        positions = tl.zeros([ROWS], tl.int32) + position
    else:
        token = first_token + local
        positions = position + local
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        query + token.to(tl.int64)[:, None] * query_stride + (head * HEAD_DIM)[:, None] + dims[None, :],
        mask=inside,
        other=0.0,
    )
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    masked_from = start
    if TWO_PHASES:
        masked_from += (tl.minimum(stop, position + 1) - start) // KEYS * KEYS
        for first in tl.range(start, masked_from, KEYS):
            acc, total, peak = attend_keys(
                acc, total, peak, q, keys, values, table, kv_head, first, stop, positions, scale, soft_cap, window,
                HEAD_DIM, HEAD_PAD, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE, KEYS, False, False, CAPPED, BULK, PRECISION,
            )  # fmt: skip
    for first in tl.range(masked_from, stop, KEYS):
        acc, total, peak = attend_keys(
            acc, total, peak, q, keys, values, table, kv_head, first, stop, positions, scale, soft_cap, window,
            HEAD_DIM, HEAD_PAD, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE, KEYS, True, WINDOWED, CAPPED, BULK, PRECISION,
        )  # fmt: skip

    safe_total = tl.where(total > 0.0, total, 1.0)
    acc = acc / safe_total[:, None]
    lse = tl.where(total > 0.0, peak + tl.log2(safe_total), float("-inf"))
    if SHARED:
        rows = tl.load(members + (first_token + local) * 3 + 1, mask=live, other=0)
        stride = tl.load(members + (first_token + local) * 3 + 2, mask=live, other=0)
        where = (rows + split * stride).to(tl.int64) * NUM_HEADS + head
        tl.store(partial_lse + where, lse, mask=live)
        tl.store(partial_out + where[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
    else:
        # The merge waits for this launch alone, so this launch must not end before the prefix pass has.
        if OVERLAP and AFTER_PREFIX:
            gdc_wait()
        if OVERLAP:
            gdc_launch_dependents()
        is_whole = True
        if SPLIT or AFTER_PREFIX:
            is_whole = prefix_splits + tl.cdiv(end - begin, chunk) == 1
        if is_whole:
            target = out + (token.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
        else:
            where = (partial_base + (prefix_splits + split) * count + local).to(tl.int64) * NUM_HEADS + head
            tl.store(partial_lse + where, lse, mask=live)
            tl.store(partial_out + where[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["window"])
def merge_kernel(
    out,
    records,
    partial_out,
    partial_lse,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (heads / HEADS, tiles, tokens of a tile): merge a tile's intermediate results, its prefix's and its own
    splits', by log-sum-exp. Tiles in one part were written by the attention kernel."""
    if OVERLAP:
        gdc_launch_dependents()
    record = records + tl.program_id(1) * 8
    first_token = tl.load(record + 1)
    count = tl.load(record + 2)
    position = tl.load(record + 3)
    begin = tl.load(record + 4)
    chunk = tl.load(record + 5)
    prefix_splits = tl.load(record + 6)
    partial_base = tl.load(record + 7)
    if OVERLAP:
        gdc_wait()
    local = tl.program_id(2)
    if WINDOWED:
        begin += tl.maximum(position - window + 1 - begin, 0) // KEYS * KEYS
    parts = prefix_splits + tl.cdiv(position + count - begin, chunk)
    if (local < count) & (parts > 1):
        head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        part = tl.arange(0, PARTS)
        dims = tl.arange(0, HEAD_PAD)
        live = (part < parts)[:, None] & (head < NUM_HEADS)[None, :]
        where = (partial_base + part * count + local).to(tl.int64)[:, None] * NUM_HEADS + head[None, :]
        lse = tl.load(partial_lse + where, mask=live, other=float("-inf"))
        inside = live[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(partial_out + where[:, :, None] * HEAD_DIM + dims[None, None, :], mask=inside, other=0.0)
        peak = tl.max(lse, 0)
        # Heads that only fill up HEADS have no part at all.
        weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak)[None, :])
        total = tl.sum(weight, 0)
        merged = tl.sum(partial * weight[:, :, None], 0) / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out + ((first_token + local).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        stored = (head < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(target, merged.to(out.dtype.element_ty), mask=stored)

"""Attention of prompts, and over shared prefixes, by warps with roles of their own, for Hopper GPUs.

What :mod:`attention_kernels` computes for tiles of 64 and 128 rows, arranged as in FlashAttention-3 (arXiv 2407.08608):
one warp fetches queries, keys and values by the bulk copy engine, and teams of four warps multiply, each for 64 rows of
the tile. While one team computes its softmax, the other's products keep the tensor cores busy; within a team the scores
of the next keys are computed beside the sum over the values of these. Programs stay on their multiprocessor and take
one piece of work after the other, so that the next one's first keys arrive while this one's last are used.

Keys go from the last to the first, so that only the first turns hide any. The last block of a request is fetched so
that its last key lies at the end of its place in shared memory: what comes before the block's begin is then out of
bounds, which the copy engine fills with zeros, and nobody's values, which may be NaN, stay out.

The language is Gluon, Triton's own for kernels that say where data lies and who does what. It is experimental, and its
names differ between versions: :func:`~pagedlc_engine.kernels.launch.can_specialize_warps` has those it is known to
compile with.
"""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["BOXES", "specialized_attention_kernel"]

#: Layout of what the copy engine fetches: boxes of three dimensions, their rows of 128 bytes swizzled.
BOXES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)

# The name of Triton 3.8 and later, and the one before.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _find_work(number, work, NUM_KV_HEADS: gl.constexpr):
    """What this program does as its piece of work ``number``: KV head, split and the record of a tile.

    Pieces are dealt out forwards and backwards in turn, since long tiles come first. No tokens: there is no more work.
    """
    records, _members, tiles, splits = work
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    piece = number * programs + gl.where(number % 2 == 0, program, programs - 1 - program)
    exists = piece < tiles * NUM_KV_HEADS * splits
    record = records + piece // (NUM_KV_HEADS * splits) * 8
    count = gl.load(record + 2, mask=exists, other=0)
    return piece % NUM_KV_HEADS, piece // NUM_KV_HEADS % splits, record, count


@gluon.jit
def _find_keys(record, count, split, KEYS: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr):
    """Position of the first query, and the keys of a split: the first one, the one after the last, and how often KEYS
    of them are taken, which is 0 where a tile has fewer splits."""
    position = gl.load(record + 3)
    start = 0
    stop = position + count
    if SHARED:
        stop = position + 1
    if SPLIT:
        chunk = gl.load(record + 5)
        start = split * chunk
        stop = gl.minimum(stop, start + chunk)
    return position, start, stop, gl.cdiv(gl.maximum(stop - start, 0), KEYS)


@gluon.jit
def _scores(queries, keys, slot, WHICH: gl.constexpr, KEYS: gl.constexpr, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin 64 rows of queries times KEYS keys."""
    scores = gl.zeros([64, KEYS], gl.float32, LAYOUT)
    for half in gl.static_range(HALVES):
        rows = queries.index(half).slice(64 * WHICH, 64)
        columns = keys.index(slot * HALVES + half).permute((1, 0))
        scores = warpgroup_mma(rows, columns, scores, use_acc=half > 0, is_async=True)
    return scores


@gluon.jit
def _softmax(
    scores, peak, total, scale, first, shift, last_block, positions,
    KEYS: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax. Masked, ``last_block`` of the blocks of these keys is the request's last one: it
    begins ``shift`` keys early, and those after it hold nothing."""
    if MASKED:
        column = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        block = column // 64
        early = gl.where(block == last_block, shift, 0)
        token = first + column - early
        exists = (column % 64 >= early) & (block <= last_block)
        scores = gl.where(exists[None, :] & (token[None, :] <= positions[:, None]), scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    base = new_peak
    if MASKED:
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(peak - base)
    return weight, new_peak, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _turn(
    room, turn, acc, weights, peak, total, scale, first, shift, last_block, positions,
    WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    LAYOUT: gl.constexpr, SUM_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of the next keys, beside the sum over the values of those before."""
    queries, keys, values, _, _, rings = room
    keys_full, keys_free, values_full, values_free = rings
    slot = turn % STAGES
    before = (turn - 1) % STAGES
    mbarrier.wait(keys_full.index(slot), (turn // STAGES) & 1)
    scores = _scores(queries, keys, slot, WHICH, KEYS, HEAD_DIM // 64, LAYOUT)
    mbarrier.wait(values_full.index(before), ((turn - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys_free.index(slot), count=1)
    weight, peak, total, shrink = _softmax(
        scores, peak, total, scale, first, shift, last_block, positions, KEYS, MASKED, LAYOUT
    )
    coming = gl.convert_layout(weight, weights.type.layout).to(weights.dtype)
    # A dependency of the wait, lest the compiler put the softmax after it.
    acc, weights, coming = warpgroup_mma_wait(0, deps=[acc, weights, coming])
    mbarrier.arrive(values_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUM_LAYOUT))[:, None]
    return acc, coming, peak, total


@gluon.jit
def _attend(
    room, done, turns, position, start, stop, scale,
    WHICH: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, LAYOUT: gl.constexpr, SUM_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Attention of 64 rows over the keys from ``start`` to ``stop``: sums over values, and the softmax's peaks and
    totals. ``done`` turns came before; the queries are there."""
    queries, keys, values, _, queries_free, rings = room
    keys_full, keys_free, values_full, values_free = rings
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUM_LAYOUT, 2)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) + 64 * WHICH
    positions = position + row // GROUP
    if SHARED:
        positions = position + gl.zeros_like(row)
    open_turns = gl.maximum(gl.minimum(stop, position + 1) - start, 0) // KEYS
    masked = gl.maximum(turns - open_turns, 1)
    shift = gl.cdiv(stop, 64) * 64 - stop
    last_block = (stop - 1 - start) // 64 - (turns - 1) * (KEYS // 64)
    last_key = start + (turns - 1) * KEYS

    peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([64, HEAD_DIM], gl.float32, SUM_LAYOUT)
    mbarrier.wait(keys_full.index(done % STAGES), (done // STAGES) & 1)
    scores = _scores(queries, keys, done % STAGES, WHICH, KEYS, HEAD_DIM // 64, LAYOUT)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys_free.index(done % STAGES), count=1)
    weight, peak, total, _ = _softmax(
        scores, peak, total, scale, last_key, shift, last_block, positions, KEYS, True, LAYOUT
    )
    weights = gl.convert_layout(weight, WEIGHTS).to(values.dtype)
    for turn in range(1, masked):
        acc, weights, peak, total = _turn(
            room, done + turn, acc, weights, peak, total, scale, last_key - turn * KEYS, 0, KEYS // 64, positions,
            WHICH, HEAD_DIM, KEYS, STAGES, True, LAYOUT, SUM_LAYOUT,
        )  # fmt: skip
    for turn in range(masked, turns):
        acc, weights, peak, total = _turn(
            room, done + turn, acc, weights, peak, total, scale, 0, 0, 0, positions,
            WHICH, HEAD_DIM, KEYS, STAGES, False, LAYOUT, SUM_LAYOUT,
        )  # fmt: skip
    mbarrier.arrive(queries_free, count=1)
    last = done + turns - 1
    mbarrier.wait(values_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(weights, values.index(last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values_free.index(last % STAGES), count=1)
    return acc, peak, total


@gluon.jit
def _take_queries(
    query, query_stride, queries, members, record, count, kv_head,
    WHICH: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Bring 64 rows of a tile's queries to shared memory without the copy engine."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) + 64 * WHICH
    token = gl.load(record + 1) + row // GROUP
    if SHARED:
        token = gl.load(members + token * 3, mask=row // GROUP < count, other=0)
    place = token.to(gl.int64) * query_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM
    live = (row // GROUP < count)[:, None]
    for half in gl.static_range(HEAD_DIM // 64):
        dims = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)) + 64 * half
        rows = gl.load(query + place[:, None] + dims[None, :], mask=live, other=0.0)
        queries.index(half).slice(64 * WHICH, 64).store(rows)
    fence_async_shared()


@gluon.jit
def _store(
    acc, total, out, record, count, kv_head,
    WHICH: gl.constexpr, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Write 64 rows of a tile in one part."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    result = acc / gl.convert_layout(total, gl.SliceLayout(1, acc.type.layout))[:, None]
    result = gl.convert_layout(result.to(out.dtype.element_ty), STORED)
    row = gl.arange(0, 64, gl.SliceLayout(1, STORED)) + 64 * WHICH
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORED))
    token = gl.load(record + 1) + row // GROUP
    place = token.to(gl.int64) * NUM_HEADS + kv_head * GROUP + row % GROUP
    gl.store(out + place[:, None] * HEAD_DIM + dims[None, :], result, mask=(row // GROUP < count)[:, None])


@gluon.jit
def _store_part(
    acc, total, peak, partial_out, partial_lse, members, record, count, kv_head, split,
    WHICH: gl.constexpr, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Write the intermediate results of 64 rows; rows that see none of a split's keys have a log-sum-exp of -inf."""
    SUM_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    safe_total = gl.where(total > 0.0, total, 1.0)
    lse = gl.convert_layout(gl.where(total > 0.0, peak + gl.log2(safe_total), float("-inf")), SUM_ROWS)
    row = gl.arange(0, 64, SUM_ROWS) + 64 * WHICH
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, acc.type.layout))
    live = row // GROUP < count
    if SHARED:
        member = members + (gl.load(record + 1) + row // GROUP) * 3
        place = gl.load(member + 1, mask=live, other=0) + split * gl.load(member + 2, mask=live, other=0)
    else:
        place = gl.load(record + 7) + split * count + row // GROUP
    place = place.to(gl.int64) * NUM_HEADS + kv_head * GROUP + row % GROUP
    result = acc / gl.convert_layout(safe_total, SUM_ROWS)[:, None]
    gl.store(partial_lse + place, lse, mask=live)
    gl.store(partial_out + place[:, None] * HEAD_DIM + dims[None, :], result, mask=live[:, None])


@gluon.jit
def _multiply(
    room, work, query, query_stride, results, scale,
    WHICH: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr, BOXED: gl.constexpr,
):  # fmt: skip
    """What four warps do: their 64 rows of every piece of work."""
    queries, _, _, queries_full, _, _ = room
    _records, members, _tiles, _splits = work
    out, partial_out, partial_lse = results
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    done = 0
    fetched = 0
    number = 0
    kv_head, split, record, count = _find_work(number, work, NUM_KV_HEADS)
    while count > 0:
        position, start, stop, turns = _find_keys(record, count, split, KEYS, SPLIT, SHARED)
        if turns > 0:
            if BOXED:
                mbarrier.wait(queries_full, fetched & 1)
            else:
                _take_queries(
                    query, query_stride, queries, members, record, count, kv_head, WHICH, GROUP, HEAD_DIM, SHARED
                )
            acc, peak, total = _attend(
                room, done, turns, position, start, stop, scale,
                WHICH, GROUP, HEAD_DIM, KEYS, STAGES, SHARED, LAYOUT, SUM_LAYOUT,
            )  # fmt: skip
            # All but the third condition are known while compiling.
            if SHARED:
                _store_part(
                    acc, total, peak, partial_out, partial_lse, members, record, count, kv_head, split,
                    WHICH, NUM_HEADS, GROUP, HEAD_DIM, SHARED,
                )  # fmt: skip
            elif not SPLIT:  # noqa: SIM114
                _store(acc, total, out, record, count, kv_head, WHICH, NUM_HEADS, GROUP, HEAD_DIM)
            elif gl.load(record + 5) >= position + count:
                _store(acc, total, out, record, count, kv_head, WHICH, NUM_HEADS, GROUP, HEAD_DIM)
            else:
                _store_part(
                    acc, total, peak, partial_out, partial_lse, members, record, count, kv_head, split,
                    WHICH, NUM_HEADS, GROUP, HEAD_DIM, SHARED,
                )  # fmt: skip
            done += turns
            fetched += 1
        number += 1
        kv_head, split, record, count = _find_work(number, work, NUM_KV_HEADS)


@gluon.jit
def _find_box(table, number, blocks, shift, BLOCK_SIZE: gl.constexpr):
    """Where the 64 tokens of box ``number`` of a request lie: block and first token in it. The last box begins
    ``shift`` tokens early, those after it lie out of bounds."""
    exists = number < blocks
    block = gl.load(table + number * 64 // BLOCK_SIZE, mask=exists, other=0)
    inside = number * 64 % BLOCK_SIZE - gl.where(number == blocks - 1, shift, 0)
    return block, gl.where(exists, inside, BLOCK_SIZE)


@gluon.jit
def _load(
    room, work, inputs,
    BLOCK_SIZE: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, SHARED: gl.constexpr, BOXED: gl.constexpr,
    TEAMS: gl.constexpr,
):  # fmt: skip
    """What one warp does: fetch the queries, keys and values of every piece of work as room for them becomes free."""
    query, key_cache, value_cache, block_tables, table_stride = inputs
    queries, keys, values, queries_full, queries_free, rings = room
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALVES: gl.constexpr = HEAD_DIM // 64
    keys_full, keys_free, values_full, values_free = rings
    done = 0
    fetched = 0
    number = 0
    kv_head, split, record, count = _find_work(number, work, NUM_KV_HEADS)
    while count > 0:
        _position, start, stop, turns = _find_keys(record, count, split, KEYS, SPLIT, SHARED)
        table = block_tables + gl.load(record).to(gl.int64) * table_stride
        blocks = gl.cdiv(stop, 64)
        shift = blocks * 64 - stop
        column = kv_head * HEAD_DIM
        if BOXED and turns > 0:
            mbarrier.wait(queries_free, (fetched & 1) ^ 1)
            mbarrier.expect(queries_full, TEAMS * 64 * HEAD_DIM * 2)
            for half in gl.static_range(HALVES):
                place = [gl.load(record + 1), kv_head * GROUP, half * 64]
                _fetch(query, place, queries_full, queries.index(half))
            fetched += 1
        for turn in range(turns):
            slot = (done + turn) % STAGES
            free = (((done + turn) // STAGES) & 1) ^ 1
            first = (start + (turns - 1 - turn) * KEYS) // 64
            mbarrier.wait(keys_free.index(slot), free)
            mbarrier.expect(keys_full.index(slot), KEYS * HEAD_DIM * 2)
            for box in gl.static_range(KEYS // 64):
                block, inside = _find_box(table, first + box, blocks, shift, BLOCK_SIZE)
                for half in gl.static_range(HALVES):
                    target = keys.index(slot * HALVES + half).slice(64 * box, 64)
                    _fetch(key_cache, [block, inside, column + 64 * half], keys_full.index(slot), target)
            mbarrier.wait(values_free.index(slot), free)
            mbarrier.expect(values_full.index(slot), KEYS * HEAD_DIM * 2)
            for box in gl.static_range(KEYS // 64):
                block, inside = _find_box(table, first + box, blocks, shift, BLOCK_SIZE)
                for half in gl.static_range(HALVES):
                    target = values.index(slot).slice(64 * half, 64, dim=1).slice(64 * box, 64)
                    _fetch(value_cache, [block, inside, column + 64 * half], values_full.index(slot), target)
        done += turns
        number += 1
        kv_head, split, record, count = _find_work(number, work, NUM_KV_HEADS)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["splits", "table_stride", "tiles"])
def specialized_attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    block_tables,
    records,
    members,
    partial_out,
    partial_lse,
    tiles,
    splits,
    scale,
    table_stride,
    query_stride,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    SHARED: gl.constexpr,
    BOXED: gl.constexpr,
    TEAMS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: as many programs as the device runs at once, or fewer.

    TEAMS: groups of four warps that multiply, 64 rows each. SPLIT: keys of a tile may be shared out. SHARED: the prefix
    pass, whose queries come from the member list and all see every key; results always go to the partial buffers.
    BOXED: the copy engine fetches queries, too, which takes a group of heads that is a power of two. EARLY: the launch
    may overlap its predecessor.

    Args:
        query: [T, heads, head_dim], heads contiguous within a token; BOXED: its descriptor, in boxes of
            [64 * TEAMS / group, group, 64].
        key_cache: Descriptor of [blocks, block_size, kv_heads * head_dim] in boxes of [1, 64, 64].
        value_cache: Like ``key_cache``.
        out: [T, heads, head_dim], contiguous.
        block_tables: int32 [B, table_stride].
        records: int32 [tiles, 8], see :mod:`attention_plan`; those without tokens come last. First keys are 0, and
            keys a split multiples of 64, or all of them.
        members: int32 [members, 3], see :class:`attention_plan.AttentionPlan`.
        partial_out: float32 [rows, heads, head_dim], for tiles with several splits.
        partial_lse: float32 [rows, heads].
        tiles: Records.
        splits: The most splits any tile has.
        scale: Factor on the scores, times log2(e).
        table_stride: Blocks a row of ``block_tables``.
        query_stride: Elements from one token's queries to the next one's.
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries = gl.allocate_shared_memory(DTYPE, [HEAD_DIM // 64, TEAMS * 64, 64], TILES)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES * HEAD_DIM // 64, KEYS, 64], TILES)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, HEAD_DIM], TILES)
    queries_full = _barriers(1, 1).index(0)
    queries_free = _barriers(1, TEAMS).index(0)
    rings = (_barriers(STAGES, 1), _barriers(STAGES, TEAMS), _barriers(STAGES, 1), _barriers(STAGES, TEAMS))
    room = (queries, keys, values, queries_full, queries_free, rings)
    fence_async_shared()
    if EARLY:
        gdc_wait()
    # The merge, or what reads the keys after a shared prefix, waits for this kernel's end itself.
    if SPLIT or SHARED:
        gdc_launch_dependents()
    work = (records, members, tiles, splits)
    results = (out, partial_out, partial_lse)
    inputs = (query, key_cache, value_cache, block_tables, table_stride)
    if TEAMS == 1:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        room, work, query, query_stride, results, scale, 0,
                        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, KEYS, STAGES, SPLIT, SHARED, BOXED,
                    ),
                ),
                (
                    _load,
                    (
                        room, work, inputs, BLOCK_SIZE,
                        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, KEYS, STAGES, SPLIT, SHARED, BOXED, TEAMS,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        room, work, query, query_stride, results, scale, 0,
                        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, KEYS, STAGES, SPLIT, SHARED, BOXED,
                    ),
                ),
                (
                    _multiply,
                    (
                        room, work, query, query_stride, results, scale, 1,
                        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, KEYS, STAGES, SPLIT, SHARED, BOXED,
                    ),
                ),
                (
                    _load,
                    (
                        room, work, inputs, BLOCK_SIZE,
                        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, KEYS, STAGES, SPLIT, SHARED, BOXED, TEAMS,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip

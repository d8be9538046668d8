"""From a ragged batch to tiles of work for the attention kernels: pure host arithmetic, one upload.

A *tile* is a few consecutive query tokens of one request. Its record says where its queries, its keys and its
intermediate results lie, so that a kernel needs no other description of the batch: launch grids depend on the number
of tiles alone, and a record with no tokens makes its programs leave at once. Both are what a CUDA graph needs.

Record, eight int32 a tile:

====  ==================================================================================================
 0    row of the block table
 1    first query token, in the order of the batch (shared tiles: first entry of the member list)
 2    query tokens in the tile; 0 marks padding
 3    position of the first query token in its request (shared tiles: length of the prefix - 1)
 4    first key to read (the length of a prefix that the prefix pass has done, else 0)
 5    keys a split; a tile has ceil(keys / this) splits
 6    splits of the prefix pass whose results this tile merges
 7    first row of the tile's intermediate results
====  ==================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["AttentionGeometry", "AttentionPlan", "TileTable", "plan_attention", "split_keys"]

RECORD = 8
NARROW_ROWS = 16
WIDE_ROWS = 128
MIN_WIDE_ROWS = 64
SHARED_ROWS = 64
NARROW_SPLIT = 128
LEAST_SPLIT = 64
WIDE_SPLIT = 512
SHARED_SPLIT = 128

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The numbers of a model and its cache that decide how attention is cut into tiles.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Elements a head.
        block_size: Tokens a cache block.
        num_processors: Multiprocessors of the device.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_processors: int = 132

    @property
    def group(self) -> int:
        """Query heads that share a KV head, packed into one tile."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class TileTable:
    """Tiles of one launch.

    Args:
        records: int32 [tiles, 8] on the device.
        rows: Rows of the query tile (tokens × heads of a KV head), a power of two.
        splits: Size of the launch grid's split axis: the most splits any tile has.
        tokens: The most query tokens any tile has.
        merges_prefix: Whether some tile merges results of the prefix pass.
        spare: Tiles that a launch of a fixed size has beyond what it usually needs.
    """

    records: torch.Tensor
    rows: int
    splits: int
    tokens: int
    merges_prefix: bool = False
    spare: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything the attention kernels need to know about a step, made once and used by every layer.

    Args:
        query_lens: int32 [B], tokens of each request in this step (host).
        context_lens: int32 [B], tokens of each request in the cache, this step's included (host).
        block_tables: int32 [B, blocks] on the device.
        slots: int32 [T] on the device, where the step's keys and values are stored.
        tables: The launches: narrow tiles (decode), wide tiles (prompts), or both.
        shared: The prefix pass, if some requests share enough leading blocks.
        members: int32 [members, 3] on the device: query token, first row and row stride of its intermediate results.
        unshared: Like ``tables`` without the prefix pass, for layers with a sliding window.
        partial_rows: Rows of intermediate results that the launches need.
    """

    query_lens: Ints
    context_lens: Ints
    block_tables: torch.Tensor
    slots: torch.Tensor
    tables: tuple[TileTable, ...]
    shared: TileTable | None
    members: torch.Tensor
    unshared: tuple[TileTable, ...]
    partial_rows: int


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles on the host, before their records are packed."""

    records: Ints
    rows: int
    splits: int
    partial_rows: int
    merges_prefix: bool = False


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def split_keys(keys: Ints, num_kv_heads: int, slots: int, smallest: int) -> int:
    """How many keys one program should read at most: the split-KV decision.

    Whole tiles are left alone while the longest is no more than 1.3 times an equal share of the work, since
    splitting writes and merges intermediate results. Otherwise the work is cut for about four programs a slot.

    Args:
        keys: Keys each tile reads.
        num_kv_heads: Programs a tile and split.
        slots: Programs that the device runs at once.
        smallest: Fewest keys a split; the result is a multiple of it unless nothing is split.

    Returns:
        Keys a split; at least the longest of ``keys`` when nothing is to be split.
    """
    longest, total = int(keys.max()), int(keys.sum()) * num_kv_heads
    if longest <= smallest or longest * slots <= 1.3 * total:
        return longest
    return -(-max(smallest, total // (4 * slots)) // smallest) * smallest


def plan_attention(
    query_lens: Ints,
    context_lens: Ints,
    block_tables: Ints,
    slots: Ints,
    geometry: AttentionGeometry,
    device: torch.device,
    *,
    share_prefixes: bool = True,
) -> AttentionPlan:
    """Cut a batch into tiles.

    Args:
        query_lens: [B], tokens of each request in this step, at least 1.
        context_lens: [B], tokens of each request in the cache, this step's included.
        block_tables: [B, blocks].
        slots: [T], ``block * block_size + offset`` of each token of this step.
        geometry: Heads, block size and device of the model.
        device: Where the kernels run.
        share_prefixes: Look for leading blocks that several decoding requests share, and read them once.
    """
    query_lens, context_lens = query_lens.astype(np.int32), context_lens.astype(np.int32)
    firsts = (np.cumsum(query_lens) - query_lens).astype(np.int32)
    narrow_rows = max(NARROW_ROWS, _power_of_two(geometry.group))
    is_narrow = query_lens * geometry.group <= narrow_rows
    narrow, wide = np.flatnonzero(is_narrow), np.flatnonzero(~is_narrow)

    prefix = np.zeros_like(context_lens)
    groups = _find_groups(narrow, query_lens, context_lens, block_tables, geometry) if share_prefixes else []
    for members, length in groups:
        prefix[members] = length
    launches: list[_Tiles] = []
    plain: list[_Tiles] = []
    if len(wide):
        launches.append(_wide_tiles(wide, firsts, query_lens, context_lens, geometry))
        plain.append(launches[0])
    shared: _Tiles | None = None
    member_list: Ints = np.zeros((0, 3), np.int32)
    if len(narrow):
        chunk = _prefix_chunk(groups, query_lens, geometry)
        launches.append(_narrow_tiles(narrow, firsts, query_lens, context_lens, prefix, chunk, geometry))
        if groups:
            plain.append(_narrow_tiles(narrow, firsts, query_lens, context_lens, np.zeros_like(prefix), 1, geometry))
            shared, member_list = _shared_tiles(groups, chunk, launches[-1].records, geometry)
        else:
            plain.append(launches[-1])
    return _upload(query_lens, context_lens, block_tables, slots, launches, plain, shared, member_list, device)


def _chunked(records: Ints, geometry: AttentionGeometry, slots: int, smallest: int) -> tuple[int, int]:
    """Fill in splits and rows of intermediate results; returns the most splits of a tile and the rows in all."""
    keys = records[:, 3] + records[:, 2] - records[:, 4]
    chunk = split_keys(keys, geometry.num_kv_heads, slots, smallest)
    splits = -(-keys // chunk)
    parts = records[:, 6] + splits
    rows = np.where(parts > 1, parts * records[:, 2], 0)
    records[:, 5] = chunk
    records[:, 7] = np.cumsum(rows) - rows
    return int(splits.max()), int(rows.sum())


def _longest_first(records: Ints) -> Ints:
    """Long tiles start first, so that the last programs to finish are short ones."""
    return records[np.argsort(records[:, 4] - records[:, 3] - records[:, 2], kind="stable")]


def _narrow_tiles(
    which: npt.NDArray[np.intp],
    firsts: Ints,
    query_lens: Ints,
    context_lens: Ints,
    prefix: Ints,
    prefix_chunk: int,
    geometry: AttentionGeometry,
) -> _Tiles:
    records: Ints = np.zeros((len(which), RECORD), np.int32)
    records[:, 0] = which
    records[:, 1] = firsts[which]
    records[:, 2] = query_lens[which]
    records[:, 3] = context_lens[which] - query_lens[which]
    records[:, 4] = prefix[which]
    records[:, 6] = -(-prefix[which] // prefix_chunk)
    records = _longest_first(records)
    programs = int(context_lens[which].sum()) * geometry.num_kv_heads // NARROW_SPLIT
    smallest = NARROW_SPLIT if programs >= geometry.num_processors else LEAST_SPLIT
    splits, partial_rows = _chunked(records, geometry, 2 * geometry.num_processors, smallest)
    rows = max(NARROW_ROWS, _power_of_two(geometry.group))
    return _Tiles(records, rows, splits, partial_rows, bool(records[:, 6].any()))


def _wide_tiles(
    which: npt.NDArray[np.intp], firsts: Ints, query_lens: Ints, context_lens: Ints, geometry: AttentionGeometry
) -> _Tiles:
    longest = int(query_lens[which].max()) * geometry.group
    rows = max(WIDE_ROWS if longest > MIN_WIDE_ROWS else MIN_WIDE_ROWS, _power_of_two(geometry.group))
    tokens = rows // geometry.group
    counts = -(-query_lens[which] // tokens)
    owner = np.repeat(which, counts)
    offset = ((np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens).astype(np.int32)
    records: Ints = np.zeros((len(owner), RECORD), np.int32)
    records[:, 0] = owner
    records[:, 1] = firsts[owner] + offset
    records[:, 2] = np.minimum(tokens, query_lens[owner] - offset)
    records[:, 3] = context_lens[owner] - query_lens[owner] + offset
    records = _longest_first(records)
    splits, partial_rows = _chunked(records, geometry, geometry.num_processors, WIDE_SPLIT)
    return _Tiles(records, rows, splits, partial_rows)


# What a prefix pass must at least save in reads of keys and values, and the shortest prefix: it won from here on.
MIN_SAVED_BYTES = 24 << 20
MIN_SHARED_TOKENS = 512


def _find_groups(
    narrow: npt.NDArray[np.intp],
    query_lens: Ints,
    context_lens: Ints,
    block_tables: Ints,
    geometry: AttentionGeometry,
) -> list[tuple[npt.NDArray[np.intp], int]]:
    """Decoding requests with the same leading blocks: (rows, shared tokens) of every group worth a prefix pass."""
    if len(narrow) < 2:
        return []
    groups = []
    _, inverse, sizes = np.unique(block_tables[narrow, 0], return_inverse=True, return_counts=True)
    for head in np.flatnonzero(sizes > 1):
        rows = narrow[inverse == head]
        blocks = int((context_lens[rows] - query_lens[rows]).min()) // geometry.block_size
        same = (block_tables[rows, :blocks] == block_tables[rows[0], :blocks]).all(axis=0)
        shared = int(same.argmin()) if not same.all() else blocks
        tokens = shared * geometry.block_size
        saved = (len(rows) - 1) * tokens * geometry.num_kv_heads * geometry.head_dim * 4
        if tokens >= MIN_SHARED_TOKENS and saved >= MIN_SAVED_BYTES:
            groups.append((rows, tokens))
    return groups


def _shared_rows(groups: list[tuple[npt.NDArray[np.intp], int]], query_lens: Ints, group: int) -> int:
    largest = max(int(query_lens[rows].sum()) for rows, _ in groups)
    return max(min(SHARED_ROWS, _power_of_two(largest * group)), NARROW_ROWS, _power_of_two(group))


def _prefix_chunk(groups: list[tuple[npt.NDArray[np.intp], int]], query_lens: Ints, geometry: AttentionGeometry) -> int:
    """Keys a split of the prefix pass: about one program a multiprocessor."""
    if not groups:
        return 1
    tokens = _shared_rows(groups, query_lens, geometry.group) // geometry.group
    work = sum(length * -(-int(query_lens[rows].sum()) // tokens) for rows, length in groups)
    per_program = work * geometry.num_kv_heads // geometry.num_processors
    return max(SHARED_SPLIT, -(-per_program // 64) * 64)


def _shared_tiles(
    groups: list[tuple[npt.NDArray[np.intp], int]], chunk: int, narrow: Ints, geometry: AttentionGeometry
) -> tuple[_Tiles, Ints]:
    """Tiles of the prefix pass over ``narrow``'s query tokens, and the list of those tokens."""
    by_row = narrow[np.argsort(narrow[:, 0])]
    query_lens = np.zeros(int(by_row[-1, 0]) + 1, np.int32)
    query_lens[by_row[:, 0]] = by_row[:, 2]
    rows = _shared_rows(groups, query_lens, geometry.group)
    tokens = rows // geometry.group
    members, records = [], []
    done = 0
    for group, length in groups:
        tiles = by_row[np.searchsorted(by_row[:, 0], group)]
        counts = tiles[:, 2]
        local = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owner = np.repeat(tiles, counts, axis=0)
        members.append(np.stack([owner[:, 1] + local, owner[:, 7] + local, owner[:, 2]], axis=1))
        for first in range(0, len(local), tokens):
            count = min(tokens, len(local) - first)
            records.append((int(group[0]), done + first, count, length - 1, 0, chunk, 0, 0))
        done += len(local)
    splits = -(-max(length for _, length in groups) // chunk)
    return _Tiles(np.array(records, np.int32), rows, splits, 0), np.concatenate(members).astype(np.int32)


def _upload(
    query_lens: Ints,
    context_lens: Ints,
    block_tables: Ints,
    slots: Ints,
    launches: list[_Tiles],
    plain: list[_Tiles],
    shared: _Tiles | None,
    members: Ints,
    device: torch.device,
) -> AttentionPlan:
    """Pack every array into one buffer and send it in one copy.

    Each starts at a multiple of 16 bytes: Triton compiles another variant of a kernel for pointers that do not.
    """
    extra = plain if shared is not None else []
    arrays = [
        block_tables,
        members,
        slots,
        *(tiles.records for tiles in [*launches, *extra, *([shared] if shared else [])]),
    ]
    ends = np.cumsum([-(-array.size // 4) * 4 for array in arrays])
    packed = torch.empty(int(ends[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    starts = [0, *ends[:-1].tolist()]
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.size] = array.ravel()
    sent = packed.to(device, non_blocking=True)
    views = [sent[start : start + array.size].view(array.shape) for array, start in zip(arrays, starts, strict=True)]

    def table(tiles: _Tiles, records: torch.Tensor) -> TileTable:
        tokens = int(tiles.records[:, 2].max())
        return TileTable(records, tiles.rows, tiles.splits, tokens, tiles.merges_prefix)

    records = iter(views[3:])
    tables = tuple(table(tiles, next(records)) for tiles in launches)
    return AttentionPlan(
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=views[0],
        slots=views[2],
        tables=tables,
        unshared=tuple(table(tiles, next(records)) for tiles in extra) or tables,
        shared=table(shared, next(records)) if shared is not None else None,
        members=views[1],
        partial_rows=max([tiles.partial_rows for tiles in [*launches, *extra]], default=0),
    )

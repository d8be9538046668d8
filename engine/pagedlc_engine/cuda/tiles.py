"""Attention tiles for launches of a fixed size: host arithmetic over a step's requests.

The records are those of :mod:`pagedlc_engine.kernels.attention_plan`; what differs is that a captured launch has a
given number of tiles and splits, so keys a split grow until the splits are enough, and unused records are padding.
Rows of the block table are slots, which live on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedlc_engine.cuda.layout import StepShape
from pagedlc_engine.kernels.attention_plan import (
    LEAST_SPLIT,
    MIN_SAVED_BYTES,
    NARROW_ROWS,
    NARROW_SPLIT,
    SHARED_SPLIT,
    WIDE_SPLIT,
    AttentionGeometry,
    Ints,
    split_keys,
)

__all__ = [
    "PrefixGroup",
    "Requests",
    "find_prefix_groups",
    "longest_first",
    "narrow_records",
    "narrow_rows",
    "prefix_chunk",
    "shared_records",
    "wants_splits",
    "wide_records",
    "wide_tiles",
    "wide_wants_splits",
]

#: From here on splits of 128 keys would be so many that merging them costs more than they gain.
_LONG_PREFIX = 2048


@dataclass(frozen=True, slots=True)
class Requests:
    """A step's requests of one kind, as int32 arrays of equal length.

    Args:
        slots: Rows of the block table.
        firsts: Each one's first query token in the step.
        counts: Its query tokens.
        starts: Position of its first query token.
    """

    slots: Ints
    firsts: Ints
    counts: Ints
    starts: Ints

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests (indices) that share the blocks of their first ``tokens`` tokens."""

    rows: Ints
    tokens: int


def find_prefix_groups(
    requests: Requests, tables: Sequence[Ints], geometry: AttentionGeometry, most_tiles: int, tile_tokens: int
) -> list[PrefixGroup]:
    """Groups of one-token requests that are worth a pass of their own over what they share.

    Args:
        requests: Each with one query token.
        tables: Their block tables.
        geometry: Of the model and its cache.
        most_tiles: Tiles there is room for.
        tile_tokens: Queries a tile.
    """
    heads: dict[int, list[int]] = {}
    for row, table in enumerate(tables):
        heads.setdefault(int(table[0]), []).append(row)
    groups = []
    per_token = geometry.num_kv_heads * geometry.head_dim * 4
    for rows in heads.values():
        if len(rows) < 2:
            continue
        blocks = min(int(requests.starts[row]) for row in rows) // geometry.block_size
        if (len(rows) - 1) * blocks * geometry.block_size * per_token < MIN_SAVED_BYTES:
            continue
        matrix = np.stack([tables[row][:blocks] for row in rows])
        same = (matrix == matrix[0]).all(axis=0)
        tokens = (blocks if same.all() else int(same.argmin())) * geometry.block_size
        if (len(rows) - 1) * tokens * per_token >= MIN_SAVED_BYTES:
            groups.append(PrefixGroup(np.array(rows, np.int32), tokens))
    groups.sort(key=lambda group: -len(group.rows) * group.tokens)
    tiles = np.cumsum([-(-len(group.rows) // tile_tokens) for group in groups])
    return [group for group, needed in zip(groups, tiles, strict=True) if needed <= most_tiles]


def prefix_chunk(groups: list[PrefixGroup], splits: int) -> int:
    """Keys a split of the prefix pass."""
    longest = max(group.tokens for group in groups)
    smallest = SHARED_SPLIT if longest < _LONG_PREFIX else 2 * SHARED_SPLIT
    return max(smallest, -(-longest // (64 * splits)) * 64)


def narrow_records(
    out: Ints,
    requests: Requests,
    prefix: Ints | None,
    chunk: int,
    shape: StepShape,
    geometry: AttentionGeometry,
    order: npt.NDArray[np.intp] | None = None,
) -> Ints:
    """Fill ``out`` [shape.narrow, 8]; returns the requests' first rows of intermediate results.

    Args:
        out: Where the records go.
        requests: At most ``shape.narrow``.
        prefix: Tokens per request that the prefix pass reads, or ``None``.
        chunk: Keys a split of that pass.
        shape: The launch.
        geometry: Of the model and its cache.
        order: Long tiles first, if that is known.
    """
    count = len(requests)
    out[count:] = 0
    own = requests.starts + requests.counts
    prefix_splits = np.zeros_like(own)
    if prefix is not None:
        own = own - prefix
        prefix_splits = -(-prefix // chunk)
    keys = _keys_a_split(own, geometry, 2 * geometry.num_processors, _smallest(own, geometry), shape.narrow_splits)
    parts = prefix_splits + -(-own // keys)
    rows = np.where(parts > 1, parts * requests.counts, 0)
    bases = np.cumsum(rows) - rows
    if order is None:
        order = longest_first(requests, prefix)
    columns = (
        requests.slots,
        requests.firsts,
        requests.counts,
        requests.starts,
        np.zeros_like(own) if prefix is None else prefix,
        np.full_like(own, keys),
        prefix_splits,
        bases,
    )
    for column, values in enumerate(columns):
        out[:count, column] = values[order]
    return bases


def longest_first(requests: Requests, prefix: Ints | None) -> npt.NDArray[np.intp]:
    """Requests in the order in which their tiles should start, so that the last programs to end are short ones."""
    own = requests.starts + requests.counts
    return np.argsort(-own if prefix is None else prefix - own, kind="stable")


def _smallest(keys: Ints, geometry: AttentionGeometry) -> int:
    programs = int(keys.sum()) * geometry.num_kv_heads // NARROW_SPLIT
    return NARROW_SPLIT if programs >= geometry.num_processors else LEAST_SPLIT


def _keys_a_split(keys: Ints, geometry: AttentionGeometry, slots: int, smallest: int, splits: int) -> int:
    """What :func:`split_keys` wants, as far as ``splits`` programs a tile allow."""
    longest = int(keys.max())
    if splits == 1:
        return longest
    wanted = split_keys(keys, geometry.num_kv_heads, slots, smallest)
    least = -(-longest // splits)
    return max(wanted, -(-least // smallest) * smallest)


def wants_splits(starts: Ints, geometry: AttentionGeometry) -> bool:
    """Whether decoding requests at these positions differ so much, or are so few, that splitting keys pays."""
    keys = starts + 1
    wanted = split_keys(keys, geometry.num_kv_heads, 2 * geometry.num_processors, _smallest(keys, geometry))
    return wanted < int(keys.max())


def wide_records(out: Ints, requests: Requests, shape: StepShape, geometry: AttentionGeometry) -> None:
    """Fill ``out`` [shape.wide, 8] with tiles of prompt chunks; long tiles come first."""
    tokens = shape.wide_rows // geometry.group
    counts = -(-requests.counts // tokens)
    owner = np.repeat(np.arange(len(requests)), counts)
    offset = ((np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens).astype(np.int32)
    count = np.minimum(tokens, requests.counts[owner] - offset)
    start = requests.starts[owner] + offset
    order = np.argsort(-(start + count), kind="stable")
    owner, offset, count, start = owner[order], offset[order], count[order], start[order]
    keys = start + count
    chunk = _keys_a_split(keys, geometry, geometry.num_processors, WIDE_SPLIT, shape.wide_splits)
    rows = np.where(-(-keys // chunk) > 1, -(-keys // chunk) * count, 0)
    out[len(owner) :] = 0
    firsts, bases = requests.firsts[owner] + offset, np.cumsum(rows) - rows
    columns = (requests.slots[owner], firsts, count, start, 0, chunk, 0, bases)
    for column, values in enumerate(columns):
        out[: len(owner), column] = values


def wide_wants_splits(requests: Requests, tiles: int, geometry: AttentionGeometry) -> bool:
    """Whether few prompt chunks come after so much context that their keys should be shared out."""
    programs = tiles * geometry.num_kv_heads
    return programs <= geometry.num_processors and int((requests.starts + requests.counts).max()) > 2 * WIDE_SPLIT


def wide_tiles(counts: Ints, rows: int, geometry: AttentionGeometry) -> int:
    """Tiles that chunks of these lengths take."""
    return int((-(-counts // (rows // geometry.group))).sum())


def shared_records(
    out: Ints,
    members: Ints,
    groups: list[PrefixGroup],
    requests: Requests,
    bases: Ints,
    chunk: int,
    shape: StepShape,
    geometry: AttentionGeometry,
) -> None:
    """Fill ``out`` [shape.shared, 8] and ``members`` [_, 3] with the prefix pass over one-token requests.

    Args:
        out: Where the records go.
        members: Where the query tokens of the tiles go.
        groups: Who shares what.
        requests: The step's.
        bases: What :func:`narrow_records` returned.
        chunk: Keys a split.
        shape: The launch.
        geometry: Of the model and its cache.
    """
    tokens = shape.shared_rows // geometry.group
    out[:] = 0
    at = done = 0
    for group in groups:
        rows = group.rows
        members[done : done + len(rows), 0] = requests.firsts[rows]
        members[done : done + len(rows), 1] = bases[rows]
        members[done : done + len(rows), 2] = 1
        for first in range(0, len(rows), tokens):
            count = min(tokens, len(rows) - first)
            out[at] = (requests.slots[rows[0]], done + first, count, group.tokens - 1, 0, chunk, 0, 0)
            at += 1
        done += len(rows)


def narrow_rows(geometry: AttentionGeometry) -> int:
    """Rows of a narrow tile."""
    return max(NARROW_ROWS, 1 << max(0, geometry.group - 1).bit_length())

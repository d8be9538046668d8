"""Cutting a step's attention into parts that are each one dense product.

Softmax attention over a set of keys can be computed piece by piece: each piece gives an output and the
log-sum-exp of its scores, and pieces are merged by weighting the outputs with those sums. That lets the
prefix that several requests share be read once for all of them (Hydragen, arXiv 2402.05099; cascade
attention in FlashInfer, arXiv 2501.01005), lets a new chunk attend to its cached past without a mask, and
lets each remaining piece be batched with pieces of its own length.

Only numpy here: what a part is, not how it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pagedlc_engine.attention.base import AttentionBatch, IntArray
from pagedlc_engine.attention.sharing import SharedRun, find_shared_runs

__all__ = ["BandPart", "ChunkPart", "Limits", "PrefixPart", "RowsPart", "StepParts", "contiguous", "split_step"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When splitting pays, in tokens; the defaults are measured on a CPU.

    Args:
        shared_tokens: Repeated reads of shared keys that one more part must save.
        padding_tokens: Padding keys for which one more batch is not worth its calls.
        query_padding_tokens: The same for padding queries of new chunks.
        gather_tokens: Most keys gathered at once. What is gathered should still be in the processor's cache
            when it is used, which also bounds temporary memory.
        mask_elements: Most elements of an explicit query-by-key mask.
    """

    shared_tokens: int = 512
    padding_tokens: int = 384
    query_padding_tokens: int = 32
    gather_tokens: int = 2048
    mask_elements: int = 1 << 22


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Requests over their own blocks, batched: no query of the part is restricted beyond ``key_begin/end``.

    Args:
        tokens: ``[N, Q]`` indices into the step's tokens, short rows padded with their last token.
        query_lens: ``[N]``, real queries per row.
        blocks: ``[N, blocks]``, short rows padded with their own first block.
        key_begin: ``[N]``, first valid key of the row's gathered keys.
        key_end: ``[N]``, end of the valid keys.
    """

    tokens: IntArray
    query_lens: IntArray
    blocks: IntArray
    key_begin: IntArray
    key_end: IntArray


@dataclass(frozen=True, slots=True)
class PrefixPart:
    """All of ``tokens`` (``[R]``) attend to all of the first ``length`` keys of ``blocks`` (``[blocks]``)."""

    tokens: IntArray
    blocks: IntArray
    length: int


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """New chunks attending causally to themselves; ``tokens`` and ``query_lens`` as in :class:`RowsPart`."""

    tokens: IntArray
    query_lens: IntArray


@dataclass(frozen=True, slots=True)
class BandPart:
    """Consecutive queries of one request under a sliding window.

    Args:
        tokens: ``[Q]`` indices into the step's tokens.
        blocks: ``[blocks]``, holding every key in any of the queries' windows.
        query_offset: Position of the first query, counted from the first key of ``blocks``.
        window: A query sees itself and the ``window - 1`` keys before it.
    """

    tokens: IntArray
    blocks: IntArray
    query_offset: int
    window: int


@dataclass(slots=True)
class StepParts:
    """``first`` covers every token of the step exactly once; ``merged`` is folded into its result."""

    first: list[RowsPart | ChunkPart | BandPart] = field(default_factory=list)
    merged: list[RowsPart | PrefixPart] = field(default_factory=list)


def split_step(batch: AttentionBatch, block_size: int, window: int | None, limits: Limits) -> StepParts:
    """Cut one step's attention into parts.

    Args:
        batch: The step.
        block_size: Tokens per block.
        window: Sliding window in tokens; ``None`` attends to everything before.
        limits: When splitting pays.
    """
    splitter = _Splitter(batch, block_size, limits)
    if window is None or window >= int(batch.context_lens.max()):
        splitter.split_full()
    else:
        splitter.split_windowed(window)
    return splitter.parts


class _Splitter:
    """Working state of :func:`split_step`; rows are requests, in the order of the batch."""

    # A chunk at least this long fills a product of its own with its cached past.
    _LONG_CHUNK = 16

    def __init__(self, batch: AttentionBatch, block_size: int, limits: Limits) -> None:
        self.parts = StepParts()
        self._block_size = block_size
        self._limits = limits
        self._tables = batch.block_tables
        self._query_lens = batch.query_lens.astype(np.int64)
        self._context_lens = batch.context_lens.astype(np.int64)
        self._token_starts = np.cumsum(self._query_lens) - self._query_lens
        decoding = self._query_lens == 1
        self._decoding = np.flatnonzero(decoding)
        self._chunked = np.flatnonzero(~decoding)
        # A lone token finds itself in the cache; a chunk attends to itself apart.
        self._key_ends = np.where(decoding, self._context_lens, self._context_lens - self._query_lens)
        self._begins = np.zeros_like(self._key_ends)

    def split_full(self) -> None:
        """Without a window: shared prefixes, then each row's rest."""
        # Never a decoding row's last token: what is left for it must not be empty.
        shareable = np.where(self._query_lens == 1, self._key_ends - 1, self._key_ends)
        minimum = self._limits.shared_tokens // self._block_size
        for run in find_shared_runs(self._tables, shareable // self._block_size, minimum):
            self._add_shared(run)
        for row in self._decoding:
            self._shorten_decoding_row(int(row))
        self._add_decoding()
        self._add_chunks()
        self._add_cached_past()

    def split_windowed(self, window: int) -> None:
        """With a window: only the blocks inside it are touched, and nothing is shared."""
        self._begins[self._decoding] = np.maximum(self._context_lens[self._decoding] - window, 0)
        self._add_decoding()
        for row in self._chunked:
            self.parts.first.extend(self._bands(int(row), window))

    def _tokens_of(self, row: int) -> IntArray:
        start = self._token_starts[row]
        return np.arange(start, start + self._query_lens[row])

    def _blocks_between(self, row: int, begin: int, end: int) -> IntArray:
        return self._tables[row, begin // self._block_size : -(-end // self._block_size)]

    def _add_prefix(self, row: int, tokens: IntArray, begin: int, end: int) -> None:
        """Keys ``begin .. end`` of ``row`` for ``tokens``, gathered in pieces; ``begin`` is a block's start."""
        step = max(self._limits.gather_tokens // self._block_size, 1) * self._block_size
        if contiguous(self._blocks_between(row, begin, end)):
            step = end - begin
        for left in range(begin, end, step):
            right = min(left + step, end)
            self.parts.merged.append(PrefixPart(tokens, self._blocks_between(row, left, right), right - left))

    def _add_shared(self, run: SharedRun) -> None:
        begin, end = run.begin * self._block_size, run.end * self._block_size
        tokens = np.concatenate([self._tokens_of(row) for row in sorted(run.rows)])
        self._add_prefix(run.rows[0], tokens, begin, end)
        self._begins[run.rows] = end

    def _shorten_decoding_row(self, row: int) -> None:
        """Take off a row's front what is too much for one gather; a row in one run is read in place."""
        begin, end = int(self._begins[row]), int(self._key_ends[row])
        excess = end - begin - self._limits.gather_tokens
        if excess <= 0 or contiguous(self._blocks_between(row, begin, end)):
            return
        middle = begin + -(-excess // self._block_size) * self._block_size
        self._add_prefix(row, self._tokens_of(row), begin, middle)
        self._begins[row] = middle

    def _add_decoding(self) -> None:
        self.parts.first.extend(self._rows_part(bucket) for bucket in self._by_keys(self._decoding))

    def _by_keys(self, rows: IntArray) -> Iterator[IntArray]:
        """Rows of similar key counts, in the order of the batch within each group."""
        lengths = self._key_ends[rows] - self._begins[rows] // self._block_size * self._block_size
        limits = self._limits
        for bucket in _buckets(lengths, limits.padding_tokens, limits.gather_tokens):
            yield rows[bucket]

    def _rows_part(self, rows: IntArray) -> RowsPart:
        size = self._block_size
        first_blocks = self._begins[rows] // size
        counts = -(-self._key_ends[rows] // size) - first_blocks
        columns = np.arange(counts.max())
        # Padding repeats the row's own first block: no request ever reads another one's values.
        columns = first_blocks[:, None] + np.where(columns < counts[:, None], columns, 0)
        return RowsPart(
            *self._padded_tokens(rows),
            blocks=self._tables[rows[:, None], columns],
            key_begin=self._begins[rows] - first_blocks * size,
            key_end=self._key_ends[rows] - first_blocks * size,
        )

    def _padded_tokens(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        lens = self._query_lens[rows]
        columns = np.minimum(np.arange(lens.max()), lens[:, None] - 1)
        return self._token_starts[rows][:, None] + columns, lens

    def _add_chunks(self) -> None:
        rows = self._chunked
        if not len(rows):
            return
        lens = self._query_lens[rows]
        for bucket in _buckets(lens, self._limits.query_padding_tokens, self._limits.gather_tokens):
            self.parts.first.append(ChunkPart(*self._padded_tokens(rows[bucket])))

    def _add_cached_past(self) -> None:
        """What chunks have in the cache beyond shared prefixes: long chunks one by one, short ones batched."""
        rows = self._chunked[self._key_ends[self._chunked] > self._begins[self._chunked]]
        alone = self._query_lens[rows] >= self._LONG_CHUNK
        alone |= self._key_ends[rows] - self._begins[rows] > self._limits.gather_tokens
        for row in rows[alone]:
            self._add_prefix(int(row), self._tokens_of(row), int(self._begins[row]), int(self._key_ends[row]))
        if not alone.all():
            self.parts.merged.extend(self._rows_part(bucket) for bucket in self._by_keys(rows[~alone]))

    def _bands(self, row: int, window: int) -> Iterator[BandPart]:
        tokens, context, size = self._tokens_of(row), int(self._context_lens[row]), self._block_size
        start = context - len(tokens)
        # tile * (tile + window + block) elements at most: a square root without the root.
        tile = len(tokens)
        while tile > 1 and tile * (tile + window + size) > self._limits.mask_elements:
            tile = -(-tile // 2)
        for left in range(0, len(tokens), tile):
            queries = tokens[left : left + tile]
            begin = max(start + left - window + 1, 0) // size * size
            end = start + left + len(queries)
            yield BandPart(queries, self._blocks_between(row, begin, end), start + left - begin, window)


def _buckets(lengths: IntArray, padding: int, total: int) -> Iterator[IntArray]:
    """Group items so that padding each to its group's longest adds at most ``padding``, and no group of
    several exceeds ``total`` after padding. Yields sorted indices."""
    order = np.argsort(-lengths, kind="stable")
    group: list[int] = []
    longest = padded = 0
    for index in order:
        length = int(lengths[index])
        if group and (padded + longest - length > padding or (len(group) + 1) * longest > total):
            yield np.array(sorted(group))
            group, padded = [], 0
        if not group:
            longest = length
        padded += longest - length
        group.append(int(index))
    if group:
        yield np.array(sorted(group))


def contiguous(indices: IntArray) -> bool:
    """True when the indices ascend by one."""
    return len(indices) == 1 or bool((indices[1:] - indices[:-1] == 1).all())

"""Tiles of fixed launches cover every key once, whatever the requests look like."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.cuda.layout import StepShape
from pagedlc_engine.cuda.shapes import MixedNeed, ShapeBook
from pagedlc_engine.cuda.tiles import (
    Requests,
    find_prefix_groups,
    narrow_records,
    prefix_chunk,
    shared_records,
    wide_records,
    wide_tiles,
)
from pagedlc_engine.kernels.attention_plan import RECORD, AttentionGeometry

GEOMETRY = AttentionGeometry(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16)
BOOK = ShapeBook(GEOMETRY, max_num_seqs=64, max_num_batched_tokens=1024)


def requests_of(counts: list[int], starts: list[int]) -> Requests:
    array = np.array(counts, np.int32)
    firsts = (np.cumsum(array) - array).astype(np.int32)
    return Requests(np.arange(len(array), dtype=np.int32), firsts, array, np.array(starts, np.int32))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=64), st.booleans())
def test_decoding(starts: list[int], split: bool) -> None:
    shape = BOOK.decode(len(starts), split=split, shared=False)
    assert shape is not None
    out = np.full((shape.narrow, RECORD), -1, np.int32)
    narrow_records(out, requests_of([1] * len(starts), starts), None, 1, shape, GEOMETRY)
    assert (out[len(starts) :] == 0).all()
    used = 0
    for slot, first, count, position, begin, chunk, prefix_parts, base in out[: len(starts)].tolist():
        assert (first, count, position, begin, prefix_parts) == (slot, 1, starts[slot], 0, 0)
        parts = -(-(position + 1) // chunk)
        assert parts <= shape.narrow_splits
        used = max(used, base + parts if parts > 1 else 0)
    assert used <= shape.partial_rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 300), st.integers(0, 5000)), min_size=1, max_size=6), st.booleans())
def test_prompt_chunks(chunks: list[tuple[int, int]], split: bool) -> None:
    counts = [count for count, _ in chunks]
    requests = requests_of(counts, [start for _, start in chunks])
    need = MixedNeed(sum(counts), len(counts), 0, requests.counts, split)
    shape = BOOK.mixed(need) or BOOK.exact(need)
    out = np.full((shape.wide, RECORD), -1, np.int32)
    wide_records(out, requests, shape, GEOMETRY)
    tiles = wide_tiles(requests.counts, shape.wide_rows, GEOMETRY)
    assert (out[tiles:] == 0).all()
    covered = np.zeros(sum(counts), np.int32)
    for slot, first, count, position, _, chunk, _, base in out[:tiles].tolist():
        covered[first : first + count] += 1
        assert position - int(requests.starts[slot]) == first - int(requests.firsts[slot])
        parts = -(-(position + count) // chunk)
        assert parts <= shape.wide_splits
        assert parts == 1 or base + parts * count <= shape.partial_rows
    assert (covered == 1).all()


@pytest.mark.parametrize(
    ("requests", "splits"), [(32, {False: 16, True: 8}), (64, {False: 8, True: 4}), (4, {False: 16, True: 16})]
)
def test_splits_of_a_prefix_pass_fill_the_card_once(requests: int, splits: dict[bool, int]) -> None:
    for specialized, wanted in splits.items():
        book = ShapeBook(AttentionGeometry(32, 8, 128, 64), 64, 1024, specialized=specialized)
        shape = book.decode(requests, split=False, shared=True)
        assert shape is not None
        assert shape.shared_splits == wanted


def test_shared_prefixes_are_read_once() -> None:
    shared = list(range(1, 401))
    tables = [np.array([*shared, 1000 + row], np.int32) for row in range(20)] + [np.arange(5000, 5401, dtype=np.int32)]
    requests = requests_of([1] * 21, [6400 + row % 16 for row in range(21)])
    shape = BOOK.decode(21, split=False, shared=True)
    assert shape is not None
    groups = find_prefix_groups(requests, tables, GEOMETRY, shape.shared, BOOK.shared_tile_tokens(shape))
    assert [(group.tokens, group.rows.tolist()) for group in groups] == [(6400, list(range(20)))]
    chunk = prefix_chunk(groups, shape.shared_splits)
    prefix = np.array([6400] * 20 + [0], np.int32)
    out, tiles = np.zeros((shape.narrow, RECORD), np.int32), np.zeros((shape.shared, RECORD), np.int32)
    members = np.zeros((64, 3), np.int32)
    bases = narrow_records(out, requests, prefix, chunk, shape, GEOMETRY)
    shared_records(tiles, members, groups, requests, bases, chunk, shape, GEOMETRY)
    assert tiles[:, 2].sum() == 20
    assert -(-6400 // chunk) <= shape.shared_splits
    parts = {
        int(row[0]): (int(row[4]), int(row[6]) + -(-(int(row[3]) + 1 - int(row[4])) // int(row[5]))) for row in out[:21]
    }
    assert parts[0][0] == 6400
    assert parts[20][0] == 0
    spans = sorted((int(bases[row]), parts[row][1] if parts[row][1] > 1 else 0) for row in range(21))
    for (base, length), (following, _) in pairwise(spans):
        assert base + length <= following
    assert members[:20, 0].tolist() == list(range(20))


def test_every_captured_shape_has_a_size() -> None:
    shapes = BOOK.captured()
    assert len(shapes) == len(set(shapes))
    assert {shape.tokens for shape in shapes if shape.decodes} == set(BOOK.decode_sizes)
    assert max(shape.tokens for shape in shapes) == 1024
    assert BOOK.decode(65, split=False, shared=False) is None


def test_long_steps_have_a_shape_for_everything_and_one_for_few_whole_prompts() -> None:
    book = ShapeBook(GEOMETRY, max_num_seqs=256, max_num_batched_tokens=8192)
    captured = {shape for shape in book.captured() if shape.tokens > 2048}
    sizes = [2560, 3072, 4096, 6144, 8192]
    assert sorted((shape.tokens, shape.narrow) for shape in captured) == [(n, k) for n in sizes for k in (0, 256)]

    def shape(prompts: int, tokens: int, narrow: int) -> StepShape:
        chunks = np.array([tokens] * prompts, np.int32)
        found = book.mixed(MixedNeed(prompts * tokens + narrow, prompts + narrow, narrow, chunks, False))
        assert found in captured
        return found

    few = shape(1, 8192, 0)
    assert (few.narrow, few.samples) == (0, 64)
    # Many short prompts, whose last tiles are not full, with and without answers beside them.
    for narrow in (0, 100):
        many = shape(150, 50, narrow)
        assert (many.narrow, many.samples) == (256, 256)


def test_a_late_chunk_alone_has_few_idle_programs_and_several_share_their_keys_out_too() -> None:
    captured = set(BOOK.captured())

    def shape(chunks: int) -> StepShape:
        found = BOOK.mixed(MixedNeed(8 * chunks, chunks, 0, np.array([8] * chunks, np.int32), True))
        assert found in captured
        return found

    alone, several, many = shape(1), shape(4), shape(60)
    assert alone.wide_splits > 1
    assert alone.wide <= 2
    assert several.wide_splits > 1
    assert several.wide >= 4
    assert many.wide >= 60


def test_a_shape_that_is_not_captured_fits_exactly() -> None:
    counts = np.array([2] * 60, np.int32)
    need = MixedNeed(120, 60, 0, counts, False)
    shape = ShapeBook(GEOMETRY, 64, 1024, capture=False).exact(need)
    assert isinstance(shape, StepShape)
    assert (shape.tokens, shape.wide, shape.narrow) == (128, 60, 0)

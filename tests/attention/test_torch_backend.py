"""Answers over the paged cache are those of plain dense attention, whatever shares a step and a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlc_engine.attention.base import kv_bytes_per_block
from pagedlc_engine.attention.parts import Limits
from pagedlc_engine.errors import OutOfMemoryError
from tests.attention.helpers import EAGER, NEVER, Row, Shape, World

LIMITS = pytest.mark.parametrize("limits", [None, EAGER, NEVER], ids=["default", "eager", "never"])
POISON = pytest.mark.parametrize("poison", [0.0, 1e30, float("nan"), float("inf")])


def blocks_for(tokens: int, size: int, free: list[int]) -> list[int]:
    return [free.pop() for _ in range(-(-tokens // size))]


def shuffled(count: int, seed: int = 0) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(count)]


def unrelated(lengths: list[tuple[int, int]], size: int = 4, count: int = 200, seed: int = 0) -> list[Row]:
    """Rows of ``(cached, new)`` tokens over blocks of their own, scattered in memory."""
    free = shuffled(count, seed)
    return [Row(cached, new, blocks_for(cached + new, size, free)) for cached, new in lengths]


@LIMITS
@POISON
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(3, 1), (4, 1), (5, 1), (0, 1)],
        [(40, 1), (7, 1), (90, 1), (41, 1)],
        [(0, 1), (0, 4), (0, 5), (0, 3), (0, 17)],
        [(12, 5), (8, 8), (3, 2), (50, 30), (9, 4)],
        [(30, 1), (0, 9), (60, 1), (21, 20), (2, 1), (17, 3), (64, 3)],
    ],
    ids=["one", "block-edges", "decode", "fresh", "chunks", "mixed"],
)
def test_ragged_steps_match_dense_attention(lengths: list[tuple[int, int]], limits: Limits, poison: float) -> None:
    world = World(limits=limits)
    world.poison(poison)
    rows = unrelated(lengths)
    world.fill(rows)
    world.check(rows)


@LIMITS
@pytest.mark.parametrize("new", [1, 2, 20])
def test_one_request_in_one_run_of_blocks(limits: Limits, new: int) -> None:
    world = World(limits=limits)
    rows = [Row(83, new, list(range(10, 40)))]
    world.fill(rows)
    world.check(rows)


@LIMITS
def test_runs_of_blocks_that_break_off(limits: Limits) -> None:
    world = World(limits=limits)
    rows = [
        Row(61, 1, [*range(20, 32), 90, 3, 77, 78]),
        Row(47, 1, list(range(100, 112))),
        Row(33, 6, [*range(60, 66), 150, 151, 152, 153]),
    ]
    world.fill(rows)
    world.check(rows)


@LIMITS
@POISON
def test_shared_prefixes_match_dense_attention(limits: Limits, poison: float) -> None:
    """A tree: all share a system prompt, some a document, two of these a question; lengths all differ."""
    world = World(limits=limits)
    world.poison(poison)
    free = shuffled(200)
    system, document, question = (blocks_for(tokens, 4, free) for tokens in (12, 40, 8))
    rows = [
        Row(12 + 3, 1, system + blocks_for(4, 4, free)),
        Row(12 + 40, 1, system + document + blocks_for(1, 4, free)),
        Row(12 + 40 + 8, 1, system + document + question + blocks_for(1, 4, free)),
        Row(12 + 40 + 8 + 5, 1, system + document + question + blocks_for(6, 4, free)),
        Row(12 + 40, 9, system + document + blocks_for(9, 4, free)),
        Row(12 + 40 + 3, 2, system + document + blocks_for(5, 4, free)),
        Row(12, 30, system + blocks_for(30, 4, free)),
        Row(0, 7, blocks_for(7, 4, free)),
        Row(29, 1, blocks_for(30, 4, free)),
    ]
    world.fill(rows)
    world.check(rows)


def test_a_prefix_shared_down_to_the_last_token() -> None:
    """The same blocks, the same length: each row's own last token is still its own to read."""
    world = World(limits=EAGER)
    blocks = blocks_for(16, 4, shuffled(200))
    rows = [Row(15, 1, blocks)]
    world.fill(rows)
    twin = Row(15, 1, [*blocks[:3], 199])
    world.fill([Row(12, 3, twin.blocks)])
    world.step([Row(12, 3, twin.blocks)])
    world.check([*rows, twin])


@LIMITS
def test_requests_read_blocks_that_the_same_step_fills(limits: Limits) -> None:
    world = World(limits=limits)
    world.poison(float("nan"))
    free = shuffled(200)
    shared = blocks_for(24, 4, free)
    rows = [
        Row(24, 1, shared + blocks_for(1, 4, free)),
        Row(0, 24, shared),
        Row(16, 11, shared[:4] + blocks_for(11, 4, free)),
    ]
    world.check(rows)


@LIMITS
@pytest.mark.parametrize("window", [1, 3, 4, 9, 64])
def test_sliding_window(limits: Limits, window: int) -> None:
    world = World(shape=Shape(num_layers=3, layer_windows=(None, window, window)), limits=limits)
    world.poison(float("nan"))
    rows = unrelated([(0, 1), (30, 1), (3, 1), (4, 1), (0, 22), (41, 13), (9, 2), (100, 1)])
    world.fill(rows)
    world.check(rows)


@pytest.mark.parametrize("shape", [Shape(num_heads=4, num_kv_heads=4), Shape(num_heads=8, num_kv_heads=1, head_dim=20)])
def test_head_layouts(shape: Shape) -> None:
    world = World(shape=shape)
    rows = unrelated([(30, 1), (0, 9), (60, 1), (21, 20), (2, 1)])
    world.fill(rows)
    world.check(rows)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    world = World(dtype=dtype, limits=EAGER)
    world.poison(float("nan"))
    rows = unrelated([(30, 1), (0, 9), (60, 1), (21, 20), (2, 1)])
    world.fill(rows)
    world.check(rows, tolerance)


def test_real_sizes_take_the_default_splits() -> None:
    """Long enough for every default limit: shared documents, long runs, several batches by length."""
    world = World(shape=Shape(num_heads=3, num_kv_heads=1, head_dim=8), block_size=16, num_blocks=600)
    free = shuffled(300)
    document = blocks_for(800, 16, free)
    rows = [
        Row(900, 1, document + blocks_for(101, 16, free)),
        Row(801, 1, document + blocks_for(2, 16, free)),
        Row(800, 40, document + blocks_for(40, 16, free)),
        Row(1000, 1, [*range(300, 360), *blocks_for(41, 16, free)]),
        Row(700, 1, list(range(400, 444))),
        Row(20, 1, blocks_for(21, 16, free)),
        Row(600, 1, blocks_for(601, 16, free)),
        Row(0, 100, blocks_for(100, 16, free)),
        Row(0, 3, blocks_for(3, 16, free)),
    ]
    world.fill(rows)
    world.check(rows)


def test_generation_continues_over_its_own_cache() -> None:
    """Prompt in chunks, then token by token over block boundaries, beside a neighbour that does the same."""
    world = World()
    world.poison(float("nan"))
    first, second = shuffled(200)[:10], shuffled(200)[10:20]
    for cached, new in [(0, 7), (7, 7), (14, 1), (15, 1), (16, 1), (17, 1)]:
        world.check([Row(cached, new, first), Row(cached, new, second)])


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[Row], int | None]:
    """Rows that fork off earlier rows at block boundaries, in random order over scattered blocks."""
    size = draw(st.sampled_from([2, 4, 16]))
    window = draw(st.sampled_from([None, None, 5, 30]))
    free = list(range(400))
    if draw(st.booleans()):
        free = shuffled(400, draw(st.integers(0, 99)))
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 7))):
        base: list[int] = []
        if rows and draw(st.booleans()):
            parent = rows[draw(st.integers(0, len(rows) - 1))]
            base = parent.blocks[: draw(st.integers(0, parent.cached // size))]
        cached = len(base) * size + draw(st.integers(0, 40))
        new = draw(st.sampled_from([1, 1, 1, 2, 3, 17, 33]))
        rows.append(Row(cached, new, base + blocks_for(cached + new - len(base) * size, size, free)))
    return size, draw(st.permutations(rows)), window


@settings(max_examples=100, deadline=None)
@given(steps(), st.sampled_from([None, EAGER, NEVER, Limits(shared_tokens=30, gather_tokens=50)]))
def test_any_step_matches_dense_attention(step: tuple[int, list[Row], int | None], limits: Limits | None) -> None:
    size, rows, window = step
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=4, layer_windows=(window,))
    world = World(shape=shape, block_size=size, num_blocks=400, limits=limits)
    world.poison(float("nan"))
    world.fill(rows)
    world.check(rows)


def test_splitting_does_not_change_the_answer() -> None:
    free = shuffled(200)
    shared = blocks_for(60, 4, free)
    rows = [Row(62 + extra, 1, shared + blocks_for(3 + extra, 4, free)) for extra in range(5)]
    answers = []
    for limits in (EAGER, NEVER):
        world = World(limits=limits)
        world.fill(rows)
        [(answer, _)] = world.step(rows)
        answers.append(answer)
    torch.testing.assert_close(answers[0], answers[1], atol=1e-5, rtol=1e-5)


def test_a_broken_request_does_not_reach_its_neighbours() -> None:
    """One request's values are NaN; another one's answers are not, in this step or in its blocks later."""
    world = World(limits=EAGER)
    rows = unrelated([(9, 1), (22, 1), (0, 6)])
    world.fill(rows)
    world.check(rows)
    attention = world.backend.plan(world.batch(rows))
    query, key, value = world.random(8, 6, 8), world.random(8, 2, 8), world.random(8, 2, 8)
    for tensor in (query, key, value):
        tensor[1] = float("nan")
    answer = attention(0, query, key, value)
    assert answer[1].isnan().all()
    assert answer[[0, *range(2, 8)]].isfinite().all()
    heir = Row(0, 1, [rows[1].blocks[-1]])
    world.check([heir])


def test_copied_blocks_hold_the_same_tokens() -> None:
    world = World(shape=Shape(num_layers=2, layer_windows=(None, None)))
    rows = unrelated([(9, 1)])
    world.fill(rows)
    source, copy = rows[0].blocks[2], 199
    world.backend.copy_blocks([(source, copy)])
    old, new = (slice(block * 4, block * 4 + 4) for block in (source, copy))
    world.keys[:, new] = world.keys[:, old]
    world.values[:, new] = world.values[:, old]
    world.check([Row(9, 1, [*rows[0].blocks[:2], copy]), rows[0]])


def test_bytes_per_block_is_what_a_block_takes() -> None:
    shape = Shape(num_layers=3, layer_windows=(None,) * 3)
    world = World(shape=shape, num_blocks=50)
    allocated = sum(cache.blocks.nbytes for cache in world.backend._caches)
    spec: object = shape
    assert kv_bytes_per_block(spec, 4, torch.float32) * 50 == allocated  # type: ignore[arg-type]


def test_a_cache_beyond_memory_names_the_option_to_change() -> None:
    with pytest.raises(OutOfMemoryError, match="num_blocks"):
        World(num_blocks=1 << 44)

"""Attention of prompts by specialised warps, compiled, on a Hopper GPU: ``pytest -m gpu``.

That it compiles is tested without a GPU, in :mod:`tests.kernels.test_compile_ahead`.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.kernels import paged_attention as launches
from pagedlc_engine.kernels.launch import can_specialize_warps
from pagedlc_engine.kernels.paged_attention import AttentionConfig, paged_attention
from pagedlc_engine.kernels.paged_attention_reference import paged_attention_reference
from tests.kernels.support import Step, make_step, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def launched() -> Iterator[mock.Mock]:
    """Every test is of this kernel, not of the one that is there for other cards."""
    if not can_specialize_warps():
        pytest.skip("not a Hopper GPU, or an unknown version of Triton")
    attend = launches._Launch._attend_specialized
    with mock.patch.object(launches._Launch, "_attend_specialized", autospec=True, side_effect=attend) as spy:
        yield spy
    assert spy.called


def make(
    queries: list[int],
    contexts: list[int],
    *,
    heads: int = 16,
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    shared_blocks: int = 0,
    seed: int = 0,
) -> Step:
    return make_step(
        queries, contexts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        device=torch.device("cuda"), dtype=dtype, shared_blocks=shared_blocks, seed=seed,
    )  # fmt: skip


def check(step: Step, overlap: bool = False) -> None:
    out = torch.full_like(step.query, float("nan"))
    arguments = (step.query, step.key_cache, step.value_cache, step.plan)
    paged_attention(*arguments, scale=step.scale, out=out, overlap=overlap)
    assert relative_error(out, paged_attention_reference(*arguments, scale=step.scale)) <= 1e-2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(8, 8), (16, 8), (32, 8), (16, 1), (64, 1), (9, 3), (40, 8), (12, 2), (28, 4)]
)
def test_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check(make([300, 200, 129], [300, 777, 4100], **sizes))
    check(make([65], [5000], **sizes), overlap=True)


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [
    (16, 128, torch.bfloat16), (16, 128, torch.float16), (24, 128, torch.bfloat16), (32, 64, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("block_size", [64, 128])
def test_lengths_around_blocks_and_tiles(block_size: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    edges = [63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]
    for before in (0, 64, 1000):
        contexts = [length + before for length in edges]
        step = make(edges, contexts, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
        check(step, overlap=before == 1000)


@pytest.mark.parametrize(
    ("queries", "context"), [(40, 5000), (100, 16384), (500, 8200), (64, 1089), (33, 3000), (20, 8200)]
)
def test_split_keys(queries: int, context: int, launched: mock.Mock) -> None:
    step = make([queries], [context])
    assert step.plan.tables[0].splits > 1
    check(step)
    check(step, overlap=True)
    assert launched.call_count == 2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (28, 4), (24, 8)])
@pytest.mark.parametrize(("count", "blocks"), [(32, 128), (64, 33), (20, 100)])
def test_shared_prefix(count: int, blocks: int, heads: int, kv_heads: int, head_dim: int) -> None:
    contexts = [64 * blocks + 5 + 3 * row for row in range(count)]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    step = make([1] * count, contexts, shared_blocks=blocks, **sizes)
    assert step.plan.shared is not None
    check(step)
    check(step, overlap=True)


def test_more_tiles_than_programs() -> None:
    check(make([2000, 700, 64, 1500], [9000, 700, 2000, 1501]))


@pytest.mark.parametrize("seed", range(12))
def test_fuzz(seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = rng.integers(65, int(rng.choice([200, 4000])), int(rng.integers(1, 12)))
    queries = [int(rng.integers(65, limit + 1)) if rng.random() < 0.6 else 1 for limit in contexts]
    queries[0] = max(queries[0], 65)
    check(
        make(queries, contexts.tolist(), heads=[8, 16, 24, 32, 56][seed % 5], head_dim=[64, 128][seed % 2], seed=seed)
    )


def test_the_other_kernel_says_the_same() -> None:
    step = make([900, 300], [4000, 300])
    arguments = (step.query, step.key_cache, step.value_cache, step.plan)
    config = AttentionConfig(keys=64, num_warps=8, num_stages=2, bulk_copy=True, max_registers=128)
    other = paged_attention(*arguments, scale=step.scale, config=config)
    assert relative_error(paged_attention(*arguments, scale=step.scale), other) <= 5e-3


def test_a_graph_follows_the_records_on_the_device() -> None:
    """One capture serves steps with fewer tiles and other lengths."""
    step = make([500, 300], [3000, 2000])
    (table,) = step.plan.tables
    out = torch.empty_like(step.query)
    arguments = (step.query, step.key_cache, step.value_cache, step.plan)
    paged_attention(*arguments, scale=step.scale, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*arguments, scale=step.scale, out=out)
    expected = paged_attention_reference(*arguments, scale=step.scale)
    for kept in (len(table.records), len(table.records) - 3):
        gone = table.records[kept:].clone()
        table.records[kept:] = 0
        out.fill_(float("nan"))
        graph.replay()
        missing = torch.zeros(len(out), dtype=torch.bool, device="cuda")
        for _, first, count, *_ in gone.tolist():
            missing[first : first + count] = True
        assert relative_error(out[~missing], expected[~missing]) <= 1e-2
        assert out[missing].isnan().all()

"""The kernels compiled, in bfloat16, at sizes of real models: ``pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.kernels.activation import silu_mul, silu_mul_reference
from pagedlc_engine.kernels.fused_decode import fused_decode, fused_decode_reference
from pagedlc_engine.kernels.norm import add_rms_norm, add_rms_norm_reference
from pagedlc_engine.kernels.paged_attention import paged_attention
from pagedlc_engine.kernels.paged_attention_reference import paged_attention_reference
from pagedlc_engine.kernels.rope_cache import norm_rope_cache, norm_rope_cache_reference
from pagedlc_engine.kernels.sampling import sample_tokens, sample_tokens_reference
from tests.kernels.support import Step, make_step, relative_error

pytestmark = pytest.mark.gpu

HEADS = [(32, 8), (16, 8), (9, 3), (28, 4), (16, 1), (8, 8)]


def step_on_gpu(queries: list[int], contexts: list[int], **options: Any) -> Step:
    settings = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64, **options}
    return make_step(queries, contexts, device=torch.device("cuda"), dtype=torch.bfloat16, **settings)


def check(step: Step, **options: Any) -> None:
    out = torch.full_like(step.query, float("nan"))
    arguments = (step.query, step.key_cache, step.value_cache, step.plan)
    paged_attention(*arguments, scale=step.scale, out=out, **options)
    assert relative_error(out, paged_attention_reference(*arguments, scale=step.scale, **options)) <= 1e-2


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_block_sizes(head_dim: int, block_size: int) -> None:
    edges = [1, block_size - 1, block_size, block_size + 1, 700]
    check(step_on_gpu([1] * 5, edges, head_dim=head_dim, block_size=block_size))
    check(step_on_gpu([1, 300, 65, 17], [900, 300, 1000, 17], head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_head_groups(heads: int, kv_heads: int) -> None:
    check(step_on_gpu([1, 1, 3, 200], [2000, 5, 70, 333], heads=heads, kv_heads=kv_heads, block_size=16))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("queries", [1, 40, 700])
def test_sixteen_thousand_keys(queries: int, block_size: int) -> None:
    check(step_on_gpu([queries], [16384], block_size=block_size))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("options", [{"window": 100}, {"soft_cap": 3.0}, {"window": 1000, "soft_cap": 20.0}])
def test_window_and_soft_cap(options: dict[str, Any], block_size: int) -> None:
    check(step_on_gpu([1, 200, 1], [3000, 500, 50], block_size=block_size), **options)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("count", "shared", "own"), [(32, 8192, 108), (64, 2048, 192), (9, 8192, 700)])
def test_shared_prefix(count: int, shared: int, own: int, block_size: int) -> None:
    contexts = [shared + own + 3 * row for row in range(count)]
    step = step_on_gpu([1] * count, contexts, block_size=block_size, shared_blocks=shared // block_size)
    assert step.plan.shared is not None
    check(step)
    check(step, window=500)


@pytest.mark.parametrize("seed", range(12))
def test_fuzz_of_mixed_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    contexts = rng.integers(1, int(rng.choice([100, 3000])), count)
    queries = [int(rng.integers(1, min(limit, 500) + 1)) if rng.random() < 0.3 else 1 for limit in contexts]
    check(step_on_gpu(queries, contexts.tolist(), seed=seed, block_size=[16, 32, 64][seed % 3]))


@pytest.mark.parametrize("shared_blocks", [0, 100])
def test_a_graph_follows_the_records_on_the_device(shared_blocks: int) -> None:
    """One capture serves steps whose lengths have grown: the launch knows them only from the device."""
    step = step_on_gpu([1] * 40, [6500 + 10 * row for row in range(40)], shared_blocks=shared_blocks)
    assert (step.plan.shared is None) == (shared_blocks == 0)
    out = torch.empty_like(step.query)
    arguments = (step.query, step.key_cache, step.value_cache, step.plan)
    paged_attention(*arguments, scale=step.scale, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*arguments, scale=step.scale, out=out)
    for shrink in (0, 7):
        for table in step.plan.tables:
            table.records[:, 3] -= shrink
        step.plan.context_lens[:] -= shrink
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, paged_attention_reference(*arguments, scale=step.scale)) <= 1e-2


@pytest.mark.parametrize("tokens", [1, 64, 2000])
@pytest.mark.parametrize("overlap", [False, True])
def test_fused_layers(tokens: int, overlap: bool) -> None:
    bfloat = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, residual, weight = (
        torch.randn(tokens, 4096, **bfloat),
        torch.randn(tokens, 4096, **bfloat),
        torch.rand(4096, **bfloat),
    )
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(hidden, expected_residual, weight, 1e-6)
    assert relative_error(add_rms_norm(hidden, residual, weight, 1e-6, overlap=overlap), expected) < 1e-2
    assert relative_error(residual, expected_residual) < 1e-2
    gate_up = torch.randn(tokens, 2 * 3072, **bfloat)
    assert relative_error(silu_mul(gate_up, overlap=overlap), silu_mul_reference(gate_up)) < 1e-2
    projected, gains = torch.randn(tokens, 32 * 128, **bfloat), torch.rand(2, 128, **bfloat)
    angle = torch.arange(5000, device="cuda")[:, None] * torch.rand(64, device="cuda")
    rotation = torch.cat((angle.cos(), angle.sin()), dim=1)
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    slots = torch.randperm(4096, device="cuda")[:tokens].int()
    caches = torch.zeros(2, 64, 64, 8, 128, **bfloat)
    expected_caches = caches.clone()
    inputs = (projected, gains[0], gains[1], rotation, positions, slots)
    query = norm_rope_cache(*inputs, caches[0], caches[1], 16, overlap=overlap)
    expected = norm_rope_cache_reference(*inputs, expected_caches[0], expected_caches[1], 16)
    assert relative_error(query, expected) < 1e-2
    assert relative_error(caches, expected_caches) < 1e-2


@pytest.mark.parametrize("rows", [1, 64, 200])
def test_tokens_over_a_large_vocabulary(rows: int) -> None:
    logits = torch.randn(rows, 151936, device="cuda") * 3
    assert torch.equal(sample_tokens(logits, None, None, None), logits.argmax(-1))
    temperatures = torch.rand(rows, device="cuda") * 1.5
    seeds, counters = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") % 7
    tokens = sample_tokens(logits, temperatures, seeds, counters)
    reference = sample_tokens_reference(logits, temperatures, seeds, counters)
    # Sums in another order: a draw on the edge between two tokens may fall to either side.
    assert (tokens != reference).float().mean() <= 0.02


@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_filtered_tokens_over_a_large_vocabulary(rows: int, scale: float) -> None:
    logits = torch.randn(rows, 151936, device="cuda") * scale
    settings = [(20, 0.95, 0), (0, 0.9, 0), (0, 1, 0.05), (50, 1, 0), (50, 0.8, 0.1), (3000, 0.9, 0), (0, 1, 0)]
    filters = torch.tensor([settings[row % len(settings)] for row in range(rows)], device="cuda")
    seeds, counters = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") % 7
    for temperature in (0.6, 1.3):
        temperatures = torch.full((rows,), temperature, device="cuda")
        temperatures[5::11] = 0.0
        arguments = (logits, temperatures, seeds, counters, filters)
        # As above: rounding decides at an edge.
        assert (sample_tokens(*arguments) != sample_tokens_reference(*arguments)).float().mean() <= 0.02


def test_draws_follow_the_softmax() -> None:
    draws = 40000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf")], device="cuda")
    counters = torch.arange(draws, device="cuda")
    temperatures = torch.full((draws,), 0.7, device="cuda")
    tokens = sample_tokens(logits.repeat(draws, 1), temperatures, torch.full_like(counters, 11), counters)
    shares = tokens.bincount(minlength=5) / draws
    assert (shares - (logits / 0.7).softmax(-1)).abs().max() < 0.01


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 8, 60])
@pytest.mark.parametrize("block_size", [16, 64])
def test_fused_decode(count: int, block_size: int, overlap: bool) -> None:
    contexts = [1 + 173 * row % 3000 for row in range(count)]
    step = step_on_gpu([1] * count, contexts, block_size=block_size)
    projected = torch.randn(count, 48 * 128, device="cuda").bfloat16()
    gains = torch.rand(2, 128, device="cuda").bfloat16()
    angle = torch.arange(3000, device="cuda")[:, None] * torch.rand(64, device="cuda")
    rotation = torch.cat((angle.cos(), angle.sin()), dim=1)
    last = torch.tensor(contexts, device="cuda") - 1
    blocks = step.plan.block_tables[torch.arange(count, device="cuda"), last // block_size]
    step.plan.slots.copy_(blocks * block_size + last % block_size)
    caches = [step.key_cache, step.value_cache]
    expected_caches = [cache.clone() for cache in caches]
    out = torch.full((count, 32, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    arguments = (projected, gains[0], gains[1], rotation)
    locks = torch.zeros(count * 8, dtype=torch.int32, device="cuda")
    for _ in range(2):
        fused_decode(*arguments, *caches, step.plan, 32, scale=step.scale, locks=locks, out=out, overlap=overlap)
    assert not locks.any()
    expected = fused_decode_reference(*arguments, *expected_caches, step.plan, 32, scale=step.scale)
    assert relative_error(out, expected) <= 1e-2
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert relative_error(cache.nan_to_num(0.0), expected_cache.nan_to_num(0.0)) <= 1e-3

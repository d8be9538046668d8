"""The small fused kernels against their plain-torch references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.kernels.activation import silu_mul, silu_mul_reference
from pagedlc_engine.kernels.embedding import embed, embed_reference
from pagedlc_engine.kernels.fused_decode import (
    DecodeConfig,
    can_fuse_decode,
    fused_decode,
    fused_decode_reference,
)
from pagedlc_engine.kernels.norm import add_rms_norm, add_rms_norm_reference
from pagedlc_engine.kernels.rope_cache import (
    norm_rope_cache,
    norm_rope_cache_reference,
    write_cache,
    write_cache_reference,
)
from pagedlc_engine.kernels.sampling import sample_tokens, sample_tokens_reference
from tests.kernels.support import make_step, relative_error


@pytest.mark.parametrize("size", [576, 1024])
@pytest.mark.parametrize("with_residual", [True, False])
def test_norm_with_and_without_residual(device: torch.device, size: int, with_residual: bool) -> None:
    hidden, weight = torch.randn(3, size, device=device), torch.rand(size, device=device)
    residual = torch.randn(3, size, device=device) if with_residual else None
    expected_residual = residual.clone() if residual is not None else None
    expected = add_rms_norm_reference(hidden, expected_residual, weight, 1e-6)
    out = torch.full_like(hidden, float("nan"))
    assert add_rms_norm(hidden, residual, weight, 1e-6, out=out) is out
    assert relative_error(out, expected) < 1e-6
    if residual is not None and expected_residual is not None:
        torch.testing.assert_close(residual, expected_residual)


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 80), (2, 1, 96)])
def test_norm_rope_and_cache_write(
    device: torch.device, with_norm: bool, heads: int, kv_heads: int, head_dim: int
) -> None:
    tokens, blocks, block_size = 5, 4, 16
    projected = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device)
    gains = [torch.rand(head_dim, device=device) if with_norm else None for _ in range(2)]
    angle = torch.arange(50, device=device)[:, None] * torch.rand(head_dim // 2, device=device)
    rotation = torch.cat((angle.cos(), angle.sin()), dim=1)
    positions = torch.tensor([3, 0, 49, 17, 8], device=device)
    slots = torch.tensor([40, 3, -1, 63, 15], device=device)
    caches = torch.full((2, blocks, block_size, kv_heads, head_dim), 7.0, device=device)
    expected_caches = caches.clone()
    arguments = (projected, *gains, rotation, positions, slots)
    query = norm_rope_cache(*arguments, caches[0], caches[1], heads)
    expected = norm_rope_cache_reference(*arguments, expected_caches[0], expected_caches[1], heads)
    assert relative_error(query, expected) < 1e-6
    torch.testing.assert_close(caches, expected_caches)


def test_cache_write_from_slices_of_a_projection(device: torch.device) -> None:
    projected = torch.randn(4, 3, 48, device=device)
    key, value = projected[:, 1].unflatten(1, (3, 16)), projected[:, 2].unflatten(1, (3, 16))
    slots = torch.tensor([5, -1, 0, 31], device=device)
    caches = torch.zeros(2, 2, 16, 3, 16, device=device)
    expected = caches.clone()
    write_cache(key, value, slots, caches[0], caches[1])
    write_cache_reference(key, value, slots, expected[0], expected[1])
    assert torch.equal(caches, expected)


def test_silu_mul(device: torch.device) -> None:
    gate_up = torch.randn(3, 2 * 1536, device=device)
    out = torch.full((3, 1536), float("nan"), device=device)
    assert relative_error(silu_mul(gate_up, out=out), silu_mul_reference(gate_up)) < 1e-6


def test_embedding(device: torch.device) -> None:
    table = torch.randn(100, 576, device=device)
    ids = torch.tensor([99, 0, 42, 42], device=device)
    assert torch.equal(embed(ids, table), embed_reference(ids, table))


@pytest.mark.parametrize("rows", [2, 10])
def test_greedy_tokens(device: torch.device, rows: int) -> None:
    logits = torch.randn(rows, 5003, device=device)
    logits[0, [17, 4999]] = 50.0
    tokens = sample_tokens(logits, None, None, None)
    assert torch.equal(tokens, sample_tokens_reference(logits, None, None, None))
    assert tokens[0] == 17


def test_draws_are_those_of_the_reference(device: torch.device) -> None:
    rows = 24
    logits = torch.randn(rows, 5003, device=device)
    logits[:, 1000:3000] = float("-inf")
    logits[3] = float("-inf")
    logits[3, 4500] = -3.0
    temperatures = torch.linspace(0.0, 1.5, rows, device=device)
    seeds = torch.arange(-5, rows - 5, device=device)
    counters = torch.arange(rows, device=device) // 3
    tokens = sample_tokens(logits, temperatures, seeds, counters)
    assert torch.equal(tokens, sample_tokens_reference(logits, temperatures, seeds, counters))
    assert tokens[3] == 4500


def test_a_rows_token_does_not_depend_on_the_batch(device: torch.device) -> None:
    logits = torch.randn(9, 3000, device=device)
    temperatures = torch.full((9,), 0.8, device=device)
    seeds = torch.arange(9, device=device)
    counters = torch.zeros(9, dtype=torch.int64, device=device)
    tokens = sample_tokens(logits, temperatures, seeds, counters)
    for row in (0, 8):
        one = slice(row, row + 1)
        assert sample_tokens(logits[one], temperatures[one], seeds[one], counters[one])[0] == tokens[row]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (2, 1, 80), (7, 1, 128)])
def test_fused_decode(
    device: torch.device, with_norm: bool, window: int | None, held: bool, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Seven heads of 128 elements are merged four and three at once."""
    contexts = [1, 16, 17, 300]
    step = make_step(
        [1] * 4, contexts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16, device=device,
        dtype=torch.float32, processors=4,
    )  # fmt: skip
    assert can_fuse_decode(step.plan)
    assert step.plan.tables[0].splits > 1
    projected = torch.randn(4, (heads + 2 * kv_heads) * head_dim, device=device)
    gains = [torch.rand(head_dim, device=device) if with_norm else None for _ in range(2)]
    angle = torch.arange(400, device=device)[:, None] * torch.rand(head_dim // 2, device=device)
    rotation = torch.cat((angle.cos(), angle.sin()), dim=1)
    last = torch.tensor(contexts, device=device) - 1
    blocks = step.plan.block_tables[torch.arange(4, device=device), last // 16]
    step.plan.slots.copy_(blocks * 16 + last % 16)
    caches = [step.key_cache, step.value_cache]
    for cache in caches:
        cache.flatten(0, 1)[step.plan.slots.long()] = float("nan")
    expected_caches = [cache.clone() for cache in caches]
    arguments = (projected, *gains, rotation)
    out = torch.full((4, heads, head_dim), float("nan"), device=device)
    locks = torch.zeros(4 * kv_heads, dtype=torch.int32, device=device)
    config = DecodeConfig(keys=16, num_warps=4, num_stages=2, held=held, guarded=with_norm)
    fused_decode(
        *arguments, *caches, step.plan, heads, scale=step.scale, window=window, locks=locks, out=out, config=config
    )
    expected = fused_decode_reference(*arguments, *expected_caches, step.plan, heads, scale=step.scale, window=window)
    assert relative_error(out, expected) < 1e-5
    assert not locks.any()
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, expected_cache, equal_nan=True)

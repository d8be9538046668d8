"""Paged attention against float64, with NaN in every slot a request does not own and in the output beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.kernels.attention_plan import AttentionGeometry, plan_attention
from pagedlc_engine.kernels.paged_attention import AttentionConfig, paged_attention
from pagedlc_engine.kernels.paged_attention_reference import paged_attention_reference
from tests.kernels.support import Step, make_step, relative_error


def check(step: Step, tolerance: float, **options: Any) -> None:
    config = options.pop("config", None)
    out = torch.full_like(step.query, float("nan"))
    arguments = (step.query, step.key_cache, step.value_cache, step.plan)
    paged_attention(*arguments, scale=step.scale, out=out, config=config, **options)
    expected = paged_attention_reference(*arguments, scale=step.scale, **options)
    assert relative_error(out, expected) <= tolerance


SMALL = [
    # query lengths, context lengths
    pytest.param([1], [1], id="first token"),
    pytest.param([1, 1, 1, 1], [15, 16, 17, 33], id="decode around a block"),
    pytest.param([5, 40, 1], [5, 40, 70], id="prompts and decode"),
    pytest.param([30, 1, 2], [70, 100, 2], id="chunk over cached keys"),
]


@pytest.mark.parametrize(("queries", "contexts"), SMALL)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 16, 16), (3, 1, 80, 32), (8, 1, 64, 64)]
)
def test_small_batches(
    device: torch.device,
    queries: list[int],
    contexts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    step = make_step(
        queries, contexts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        device=device, dtype=torch.float32,
    )  # fmt: skip
    check(step, 1e-5)


@pytest.mark.parametrize("options", [{"window": 20}, {"soft_cap": 2.0}, {"window": 7, "soft_cap": 5.0}])
@pytest.mark.parametrize(("queries", "contexts"), SMALL[1:])
def test_window_and_soft_cap(
    device: torch.device, queries: list[int], contexts: list[int], options: dict[str, Any]
) -> None:
    step = make_step(
        queries, contexts, heads=4, kv_heads=2, head_dim=32, block_size=16, device=device, dtype=torch.float32
    )
    check(step, 1e-5, **options)


def test_long_context_is_split_and_merged(device: torch.device) -> None:
    step = make_step(
        [1, 20], [200, 600], heads=4, kv_heads=1, head_dim=16, block_size=16, device=device, dtype=torch.float32
    )
    assert all(table.splits > 1 for table in step.plan.tables)
    check(step, 1e-5)
    check(step, 1e-5, window=300)


def test_keys_by_bulk_copy(device: torch.device) -> None:
    step = make_step(
        [1, 40], [70, 140], heads=4, kv_heads=2, head_dim=64, block_size=64, device=device, dtype=torch.float16
    )
    check(step, 2e-3, config=AttentionConfig(keys=64, num_warps=4, num_stages=2, bulk_copy=True))


@pytest.fixture
def cheap_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedlc_engine.kernels.attention_plan.MIN_SAVED_BYTES", 1)
    monkeypatch.setattr("pagedlc_engine.kernels.attention_plan.MIN_SHARED_TOKENS", 1)


@pytest.mark.usefixtures("cheap_sharing")
@pytest.mark.parametrize("contexts", [[65, 70, 100, 64 + 150], [260, 150, 160, 65]])
@pytest.mark.parametrize("shared_blocks", [4, 2])
def test_shared_prefix(device: torch.device, contexts: list[int], shared_blocks: int) -> None:
    step = make_step(
        [1, 1, 3, 1], contexts, heads=4, kv_heads=2, head_dim=16, block_size=16, device=device, dtype=torch.float32,
        shared_blocks=shared_blocks,
    )  # fmt: skip
    assert step.plan.shared is not None
    check(step, 1e-5)
    check(step, 1e-5, window=50)


@pytest.mark.usefixtures("cheap_sharing")
def test_two_groups_share_two_prefixes(device: torch.device) -> None:
    geometry = AttentionGeometry(4, 2, 16, 16)
    tables = np.array([[1, 2, 7, 0], [5, 6, 8, 9], [1, 2, 3, 0], [5, 6, 4, 0], [10, 0, 0, 0]], np.int32)
    lengths = (np.array([1, 1, 2, 1, 1]), np.array([40, 60, 35, 33, 9]))
    plan = plan_attention(*lengths, tables, np.zeros(6, np.int64), geometry, device)
    assert plan.shared is not None
    assert plan.shared.records[:, :5].tolist() == [[0, 0, 3, 31, 0], [1, 3, 2, 31, 0]]
    caches = torch.randn(2, 11, 16, 2, 16, device=device)
    step = Step(torch.randn(6, 4, 16, device=device), caches[0], caches[1], plan, 0.25)
    check(step, 1e-5)


def test_sharing_is_not_used_where_it_saves_little(device: torch.device) -> None:
    step = make_step(
        [1, 1], [65, 70], heads=4, kv_heads=2, head_dim=16, block_size=16, device=device, dtype=torch.float32,
        shared_blocks=4,
    )  # fmt: skip
    assert step.plan.shared is None


def test_padding_tiles_write_nothing(device: torch.device) -> None:
    step = make_step(
        [1, 1], [20, 30], heads=2, kv_heads=1, head_dim=16, block_size=16, device=device, dtype=torch.float32
    )
    (table,) = step.plan.tables
    table.records[1, 2] = 0
    out = torch.full_like(step.query, float("nan"))
    paged_attention(step.query, step.key_cache, step.value_cache, step.plan, scale=1.0, out=out)
    written = int(table.records[0, 1])
    assert not out[written].isnan().any()
    assert out[1 - written].isnan().all()


def test_fuzz_of_mixed_batches(device: torch.device) -> None:
    rng = np.random.default_rng(7)
    for seed in range(5):
        count = int(rng.integers(1, 6))
        contexts = rng.integers(1, 90, count)
        queries = [int(rng.integers(1, limit + 1)) if rng.random() < 0.5 else 1 for limit in contexts]
        step = make_step(
            queries, contexts.tolist(), heads=6, kv_heads=2, head_dim=16, block_size=16, device=device,
            dtype=torch.float32, seed=seed, processors=4,
        )  # fmt: skip
        check(step, 1e-5, window=[None, 25][seed % 2])

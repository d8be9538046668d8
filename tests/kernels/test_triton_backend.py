"""The Triton backend through the attention seam, beside the plain-torch backend on the same steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from pagedlc_engine.attention.base import AttentionBatch, kv_bytes_per_block
from pagedlc_engine.attention.torch_backend import TorchAttention
from pagedlc_engine.attention.triton_backend import TritonAttention, allocate_cache
from pagedlc_engine.errors import OutOfMemoryError
from tests.kernels.support import relative_error

BLOCK = 16
BLOCKS = 24


def make_spec(windows: tuple[int | None, ...]) -> Any:
    return SimpleNamespace(num_heads=6, num_kv_heads=2, head_dim=16, num_layers=len(windows), layer_windows=windows)


def make_batch(steps: list[tuple[int, int]], tables: list[list[int]]) -> AttentionBatch:
    """Requests as (tokens this step, tokens in the cache afterwards)."""
    rows = np.zeros((len(tables), max(map(len, tables))), np.int32)
    slots = []
    for row, ((length, context), blocks) in enumerate(zip(steps, tables, strict=True)):
        rows[row, : len(blocks)] = blocks
        slots += [blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(context - length, context)]
    lengths = np.array(steps)
    return AttentionBatch(lengths[:, 0], lengths[:, 1], rows, np.array(slots))


STEPS = [
    make_batch([(20, 20), (37, 37)], [[5, 9], [2, 8, 1]]),
    make_batch([(1, 21), (5, 42), (33, 33)], [[5, 9], [2, 8, 1], [20, 21, 22]]),
    # The second request reads the first block of the first, written in an earlier step.
    make_batch([(1, 22), (4, 20), (1, 43)], [[5, 9], [5, 7], [2, 8, 1]]),
]


def test_same_answers_as_the_torch_backend(device: torch.device) -> None:
    spec = make_spec((None, 12))
    backends = [kind(spec, BLOCK, BLOCKS, torch.float32, device) for kind in (TritonAttention, TorchAttention)]
    for batch in STEPS:
        plans = [backend.plan(batch) for backend in backends]
        for layer in range(2):
            tokens = len(batch.slot_mapping)
            projected = torch.randn(tokens, 10, 16, device=device)
            parts = projected.split([6, 2, 2], dim=1)
            actual, expected = (plan(layer, *parts) for plan in plans)
            assert actual.shape == (tokens, 96)
            assert relative_error(actual, expected) < 1e-5


def test_copied_blocks_answer_alike(device: torch.device) -> None:
    backend = TritonAttention(make_spec((None, None)), BLOCK, BLOCKS, torch.float32, device)
    parts = [torch.randn(20, heads, 16, device=device) for heads in (6, 2, 2)]
    first = backend.plan(make_batch([(20, 20)], [[5, 9]]))
    for layer in range(2):
        first(layer, *parts)
    backend.copy_blocks([(5, 11), (9, 3)])
    backend.copy_blocks([])
    parts = [torch.randn(2, heads, 16, device=device) for heads in (6, 2, 2)]
    parts = [torch.cat((part[:1], part[:1])) for part in parts]
    both = backend.plan(make_batch([(1, 21), (1, 21)], [[5, 9], [11, 3]]))
    for layer in range(2):
        out = both(layer, *parts)
        assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("make", [TritonAttention, allocate_cache])
def test_a_cache_that_does_not_fit_names_the_settings(device: torch.device, make: Any) -> None:
    blocks = 1 << 50
    with pytest.raises(OutOfMemoryError, match=rf"{blocks} blocks .*GiB.*{device}; lower .*kv_cache_memory_bytes"):
        make(make_spec((None,)), BLOCK, blocks, torch.float32, device)


def test_bytes_per_block_are_what_is_allocated(device: torch.device) -> None:
    spec = make_spec((None, None, None))
    assert kv_bytes_per_block(spec, BLOCK, torch.float16) == 3 * 2 * 2 * 16 * 2 * BLOCK

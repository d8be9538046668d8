"""What the kernel tests share: paged caches with poison in every slot that no request owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedlc_engine.kernels.attention_plan import AttentionGeometry, AttentionPlan, plan_attention


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; NaN if anything is NaN."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


@dataclass
class Step:
    """A step's queries and a cache in which only the requests' own slots hold numbers."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    plan: AttentionPlan
    scale: float


def make_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    shared_blocks: int = 0,
    share_prefixes: bool = True,
    processors: int = 132,
    seed: int = 0,
) -> Step:
    """A random step over permuted blocks. The first ``shared_blocks`` blocks are the same for all requests.

    Every slot beyond a request's context, in its own last block too, and every block that nobody owns is NaN.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    needed = [-(-length // block_size) - shared_blocks for length in context_lens]
    num_blocks = shared_blocks + sum(needed) + 3
    order = rng.permutation(num_blocks).astype(np.int32)
    tables = np.zeros((len(needed), max(needed) + shared_blocks), np.int32)
    used = shared_blocks
    for row, count in enumerate(needed):
        tables[row, :shared_blocks] = order[:shared_blocks]
        tables[row, shared_blocks : shared_blocks + count] = order[used : used + count]
        used += count
    caches = []
    for _ in range(2):
        cache = torch.full((num_blocks * block_size, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
        for row, length in enumerate(context_lens):
            position = torch.arange(length, device=device)
            slots = torch.from_numpy(tables[row]).to(device).long()[position // block_size] * block_size
            slots += position % block_size
            numbers = torch.randn((length, kv_heads, head_dim), generator=generator, device=device)
            cache[slots] = numbers.to(dtype)
        caches.append(cache.view(num_blocks, block_size, kv_heads, head_dim))
    query = torch.randn((sum(query_lens), heads, head_dim), generator=generator, device=device).to(dtype)
    geometry = AttentionGeometry(heads, kv_heads, head_dim, block_size, processors)
    slots = np.zeros(sum(query_lens), np.int64)
    lengths = (np.array(query_lens), np.array(context_lens))
    plan = plan_attention(*lengths, tables, slots, geometry, device, share_prefixes=share_prefixes)
    return Step(query, caches[0], caches[1], plan, head_dim**-0.5)

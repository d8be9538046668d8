"""Builds steps over a paged cache and answers them densely in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedlc_engine.attention.base import AttentionBatch
from pagedlc_engine.attention.parts import Limits
from pagedlc_engine.attention.torch_backend import TorchAttention

#: Splits as soon as there is anything to split, so that small tests reach every path.
EAGER = Limits(shared_tokens=1, padding_tokens=0, query_padding_tokens=0, gather_tokens=64, mask_elements=200)
#: Never splits.
NEVER = Limits(shared_tokens=1 << 40, padding_tokens=1 << 40, query_padding_tokens=1 << 40, gather_tokens=1 << 40)


@dataclass(frozen=True)
class Shape:
    """The part of a model's description that attention needs."""

    num_layers: int = 1
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 8
    layer_windows: tuple[int | None, ...] = (None,)


@dataclass
class Row:
    """A request in a step: ``cached`` tokens before it, ``new`` in it; ``blocks`` are its block table."""

    cached: int
    new: int
    blocks: list[int]


@dataclass
class World:
    """A backend next to a float64 copy of everything that was ever written to its cache."""

    shape: Shape = field(default_factory=Shape)
    block_size: int = 4
    num_blocks: int = 200
    limits: Limits | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        spec: Any = self.shape
        self.backend = TorchAttention(
            spec, self.block_size, self.num_blocks, self.dtype, torch.device("cpu"), self.limits
        )
        self.generator = torch.Generator().manual_seed(self.seed)
        slots = self.num_blocks * self.block_size
        size = (self.shape.num_layers, slots, self.shape.num_kv_heads, self.shape.head_dim)
        self.keys = torch.full(size, float("nan"), dtype=torch.float64)
        self.values = torch.full(size, float("nan"), dtype=torch.float64)

    def random(self, *size: int) -> Tensor:
        """Values as large as those of a real model's queries and keys."""
        return (2 * torch.randn(size, generator=self.generator)).to(self.dtype)

    def poison(self, value: float) -> None:
        """Fill the whole cache, as if every block had been left behind by a broken request."""
        for cache in self.backend._caches:
            cache.blocks.fill_(value)

    def slots(self, row: Row, begin: int, end: int) -> np.ndarray:
        positions = np.arange(begin, end)
        return np.asarray(row.blocks)[positions // self.block_size] * self.block_size + positions % self.block_size

    def batch(self, rows: list[Row]) -> AttentionBatch:
        tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int32)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row.blocks)] = row.blocks
        return AttentionBatch(
            query_lens=np.array([row.new for row in rows], dtype=np.int32),
            context_lens=np.array([row.cached + row.new for row in rows], dtype=np.int32),
            block_tables=tables,
            slot_mapping=np.concatenate([self.slots(row, row.cached, row.cached + row.new) for row in rows]),
        )

    def fill(self, rows: list[Row]) -> None:
        """Compute what the rows have cached, each distinct block prefix once, through the backend itself."""
        done: set[tuple[int, ...]] = set()
        for row in rows:
            shared = 0
            while shared < row.cached // self.block_size and tuple(row.blocks[: shared + 1]) in done:
                shared += 1
            done.update(tuple(row.blocks[: count + 1]) for count in range(row.cached // self.block_size))
            begin = shared * self.block_size
            if begin < row.cached:
                self.step([Row(begin, row.cached - begin, row.blocks)])

    def step(self, rows: list[Row]) -> list[tuple[Tensor, Tensor]]:
        """Run a step with random queries, keys and values: per layer, the answer and the exact answer."""
        batch = self.batch(rows)
        attention = self.backend.plan(batch)
        tokens = len(batch.slot_mapping)
        results = []
        for layer in range(self.shape.num_layers):
            query = self.random(tokens, self.shape.num_heads, self.shape.head_dim)
            key = self.random(tokens, self.shape.num_kv_heads, self.shape.head_dim)
            value = self.random(tokens, self.shape.num_kv_heads, self.shape.head_dim)
            self.keys[layer, batch.slot_mapping] = key.double()
            self.values[layer, batch.slot_mapping] = value.double()
            results.append((attention(layer, query, key, value), self.exact(layer, rows, query.double())))
        return results

    def exact(self, layer: int, rows: list[Row], query: Tensor) -> Tensor:
        """One query and one head at a time, over exactly the keys it may see."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        window = self.shape.layer_windows[layer]
        out = []
        queries = iter(query)
        for row in rows:
            for position in range(row.cached, row.cached + row.new):
                begin = 0 if window is None else max(0, position - window + 1)
                slots = self.slots(row, begin, position + 1)
                keys = self.keys[layer, slots].repeat_interleave(group, dim=1)
                values = self.values[layer, slots].repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,lhd->hl", next(queries), keys) / self.shape.head_dim**0.5
                out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values).flatten())
        return torch.stack(out)

    def check(self, rows: list[Row], tolerance: float = 2e-5) -> None:
        """A step whose every answer is the exact one."""
        for got, expected in self.step(rows):
            assert got.shape == expected.shape
            torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)

"""Steps of the native decoder over a paged cache, and the same arithmetic in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from pagedlc_engine.attention.base import AttentionBatch
from pagedlc_engine.model import ModelSpec, read_spec
from pagedlc_engine.model.linear import PlainLinear, PlainMethod, PlainNormLinear, PlainResidualLinear
from pagedlc_engine.model.weights import build_decoder, open_weights
from pagedlc_engine.native import Library, NativeAttention, NativeDecoder
from tests.model.model_helpers import decoder_logits

CPU = torch.device("cpu")


@dataclass
class Row:
    """Tokens ``start .. start + len(tokens)`` of a sequence whose blocks are ``blocks``."""

    start: int
    tokens: torch.Tensor
    blocks: list[int]


class NativeModel:
    """A decoder and its cache."""

    def __init__(
        self, folder: Path, library: Library, *, threads: int = 2, block_size: int = 16, num_blocks: int = 64
    ) -> None:
        self.spec: ModelSpec = read_spec(folder)
        source = open_weights(folder, self.spec, "auto", torch.float32, CPU, 0)
        self.decoder = NativeDecoder(self.spec, source, library, threads, self.spec.max_position_embeddings)
        self.block_size = block_size
        self.attention = NativeAttention(self.spec, block_size, num_blocks, torch.float32, CPU)
        for cache in self.attention.caches:
            # What an earlier owner of a block left behind must not show.
            cache.fill_(float("nan"))

    def step(self, rows: list[Row]) -> list[torch.Tensor]:
        """Per row the logits of its tokens."""
        lengths = [len(row.tokens) for row in rows]
        positions = [np.arange(row.start, row.start + len(row.tokens)) for row in rows]
        tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int32)
        slots = []
        for table, row, place in zip(tables, rows, positions, strict=True):
            table[: len(row.blocks)] = row.blocks
            slots.append(table[place // self.block_size].astype(np.int64) * self.block_size + place % self.block_size)
        batch = AttentionBatch(
            query_lens=np.array(lengths, dtype=np.int32),
            context_lens=np.array([row.start + len(row.tokens) for row in rows], dtype=np.int32),
            block_tables=tables,
            slot_mapping=np.concatenate(slots),
        )
        tokens, places = torch.cat([row.tokens for row in rows]), torch.from_numpy(np.concatenate(positions))
        hidden = self.decoder.forward(tokens, places, self.attention.plan(batch))
        return list(self.decoder.compute_logits(hidden).split(lengths))


def reference_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of one sequence from torch, with every matrix and what it is multiplied with rounded in groups."""
    spec = read_spec(folder)
    source = open_weights(folder, spec, "auto", torch.float32, CPU, 0)
    return decoder_logits(build_decoder(source, spec, RoundedMethod(), torch.float32, CPU), tokens)


def rounded(x: torch.Tensor, scale_bits: int = 24) -> torch.Tensor:
    """``x`` in 127 steps of its largest number per 32; steps are rounded up to ``scale_bits`` significant bits."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    mantissa, exponent = torch.frexp(step)
    step = torch.ldexp(torch.ceil(mantissa * 2**scale_bits) / 2**scale_bits, exponent)
    return ((groups / step).round() * step).reshape(x.shape)


class RoundedMethod(PlainMethod):
    """Linear layers that round to 8-bit integers, computed in float32."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainLinear:
        return RoundedLinear(rounded(weight, 8), bias)

    def norm_linear(
        self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PlainNormLinear:
        return RoundedNormLinear(gain, eps, rounded(weight, 8), bias)

    def residual_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, spiky: bool) -> PlainResidualLinear:
        return RoundedResidualLinear(rounded(weight, 8), bias)


class RoundedLinear(PlainLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(rounded(x))


class RoundedNormLinear(PlainNormLinear):
    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(stream, self.gain.shape, self.gain, self.eps)
        return functional.linear(rounded(normed), self.weight, self.bias)


class RoundedResidualLinear(PlainResidualLinear):
    def __call__(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return super().__call__(rounded(x), stream)

"""A whole decode step in one CUDA graph, all kernels real: ``python -m benchmarks.kernels_step --out DIR``.

Shapes of Qwen3-0.6B and Qwen3-8B, random weights, context 512 of every request, block 64, keys shared out as the
engine does. ``library``: cuBLAS and the small kernels. ``own``: all products by :mod:`few_rows`. ``streamed``: those
that :func:`prefers_streaming` names. ``fused decode``: norm, rotation, cache write, attention and merge in one kernel.
With and without programmatic dependent launch, ``streamed`` with it only.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels_timing import ceilings, microseconds
from pagedlc_engine.cuda.shapes import ShapeBook
from pagedlc_engine.cuda.tiles import Requests, narrow_records, narrow_rows
from pagedlc_engine.kernels.activation import silu_mul
from pagedlc_engine.kernels.attention_plan import RECORD, AttentionGeometry, AttentionPlan, Ints, TileTable
from pagedlc_engine.kernels.embedding import embed
from pagedlc_engine.kernels.few_rows import few_rows_linear
from pagedlc_engine.kernels.fused_decode import fused_decode
from pagedlc_engine.kernels.norm import add_rms_norm
from pagedlc_engine.kernels.paged_attention import paged_attention
from pagedlc_engine.kernels.rope_cache import norm_rope_cache
from pagedlc_engine.kernels.sampling import sample_tokens
from pagedlc_engine.kernels.streamed_rows import SplitSums, prefers_streaming

BATCHES = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256)
VOCABULARY, KV_HEADS, HEAD_DIM, BLOCK, CONTEXT, EPS = 151936, 8, 128, 64, 512, 1e-6


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    intermediate: int


SHAPES = [Shape("0.6B", 28, 1024, 16, 3072), Shape("8B", 36, 4096, 32, 12288)]


def random(*shape: int, scale: float = 0.02) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale)


class Step:
    """Weights of one shape, and the decode steps over them."""

    fused = False

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        width = (shape.heads + 2 * KV_HEADS) * HEAD_DIM
        self.layers = [
            {
                "norm1": random(shape.hidden, scale=1.0),
                "norm2": random(shape.hidden, scale=1.0),
                "gains": random(2, HEAD_DIM, scale=1.0),
                "qkv": random(width, shape.hidden),
                "o": random(shape.hidden, shape.heads * HEAD_DIM),
                "gate_up": random(2 * shape.intermediate, shape.hidden),
                "down": random(shape.hidden, shape.intermediate),
            }
            for _ in range(shape.layers)
        ]
        self.embedding = random(VOCABULARY, shape.hidden)
        self.norm = random(shape.hidden, scale=1.0)
        angle = torch.arange(4096, device="cuda")[:, None] * torch.rand(HEAD_DIM // 2, device="cuda")
        self.rotation = torch.cat((angle.cos(), angle.sin()), dim=1)
        self.meeting = SplitSums(torch.device("cuda"))

    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values()) + self.embedding.nbytes

    def prepare(self, batch: int) -> None:
        pages = CONTEXT // BLOCK
        self.caches = random(self.shape.layers, 2, batch * pages, BLOCK, KV_HEADS, HEAD_DIM, scale=1.0)
        tables = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)
        slots = tables[:, -1] * BLOCK + BLOCK - 1
        self.plan = self.cut(batch, tables, slots)
        self.ids = torch.randint(0, VOCABULARY, (batch,), device="cuda")
        self.positions = torch.full((batch,), CONTEXT - 1, device="cuda")
        self.logits = torch.empty((batch, VOCABULARY), dtype=torch.float32, device="cuda")

    def cut(self, batch: int, tables: Ints, slots: Ints) -> AttentionPlan:
        """The plan of a captured step."""
        geometry = AttentionGeometry(self.shape.heads, KV_HEADS, HEAD_DIM, BLOCK)
        shape = ShapeBook(geometry, batch, batch, sizes=(batch,)).decode(batch, split=False, shared=False)
        assert shape is not None
        order, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
        records = np.zeros((batch, RECORD), np.int32)
        narrow_records(records, Requests(order, order, ones, ones * (CONTEXT - 1)), None, 1, shape, geometry)
        there = [torch.from_numpy(array).cuda() for array in (records, tables, slots)]
        launches = (TileTable(there[0], narrow_rows(geometry), shape.narrow_splits, 1),)
        return AttentionPlan(
            ones, ones * CONTEXT, there[1], there[2], launches, None, there[2], launches, shape.partial_rows
        )

    def attend(self, index: int, projected: torch.Tensor, overlap: bool) -> torch.Tensor:
        layer, (keys, values) = self.layers[index], self.caches[index]
        if self.fused:
            out = fused_decode(
                projected, layer["gains"][0], layer["gains"][1], self.rotation, keys, values, self.plan,
                self.shape.heads, scale=HEAD_DIM**-0.5, eps=EPS, locks=self.meeting.locks, overlap=overlap,
            )  # fmt: skip
            return out.view(len(out), -1)
        query = norm_rope_cache(
            projected, layer["gains"][0], layer["gains"][1], self.rotation, self.positions, self.plan.slots, keys,
            values, self.shape.heads, EPS, overlap=overlap,
        )  # fmt: skip
        out = paged_attention(query, keys, values, self.plan, scale=HEAD_DIM**-0.5, overlap=overlap)
        return out.view(len(query), -1)

    def product(self, x: torch.Tensor, weight: torch.Tensor, streams: bool) -> torch.Tensor:
        if streams and prefers_streaming(len(x), len(weight), weight.shape[1], False):
            return few_rows_linear(x, weight, split_sums=self.meeting, overlap=True)
        return torch.mm(x, weight.t())

    def gated(self, x: torch.Tensor, weight: torch.Tensor, streams: bool, overlap: bool) -> torch.Tensor:
        if streams and prefers_streaming(len(x), len(weight) // 2, weight.shape[1], True):
            return few_rows_linear(x, weight, gated=True, overlap=True)
        return silu_mul(torch.mm(x, weight.t()), overlap=overlap)

    def streamed(self, overlap: bool) -> torch.Tensor:
        return self.library(overlap, streams=True)

    def library(self, overlap: bool, streams: bool = False) -> torch.Tensor:
        residual = embed(self.ids, self.embedding, overlap=False)
        hidden = add_rms_norm(residual, None, self.layers[0]["norm1"], EPS, overlap=overlap)
        for index, layer in enumerate(self.layers):
            # After a product of cuBLAS only kernels of this package overlap.
            attended = self.attend(index, self.product(hidden, layer["qkv"], streams), overlap)
            product = self.product(attended, layer["o"], streams)
            hidden = add_rms_norm(product, residual, layer["norm2"], EPS, overlap=overlap)
            gated = self.gated(hidden, layer["gate_up"], streams, overlap)
            last = index + 1 == len(self.layers)
            gain = self.norm if last else self.layers[index + 1]["norm1"]
            product = self.product(gated, layer["down"], streams)
            hidden = add_rms_norm(product, residual, gain, EPS, overlap=overlap)
        torch.mm(hidden, self.embedding.t(), out_dtype=torch.float32, out=self.logits)
        return sample_tokens(self.logits, None, None, None)

    def own(self, overlap: bool) -> torch.Tensor:
        options: dict[str, Any] = {"overlap": overlap, "split_sums": self.meeting, "eps": EPS}
        residual = embed(self.ids, self.embedding, overlap=False)

        def normed(weight: torch.Tensor, gain: torch.Tensor, **more: Any) -> torch.Tensor:
            if len(residual) == 1:
                return few_rows_linear(residual, weight, gain=gain, **options, **more)
            hidden = add_rms_norm(residual, None, gain, EPS, overlap=overlap)
            return few_rows_linear(hidden, weight, **options, **more)

        for index, layer in enumerate(self.layers):
            attended = self.attend(index, normed(layer["qkv"], layer["norm1"]), overlap)
            few_rows_linear(attended, layer["o"], residual=residual, out=residual, **options)
            gated = normed(layer["gate_up"], layer["norm2"], gated=True)
            few_rows_linear(gated, layer["down"], residual=residual, out=residual, **options)
        normed(self.embedding, self.norm, out=self.logits)
        return sample_tokens(self.logits, None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    limits = ceilings()
    results: list[dict[str, Any]] = []
    for shape in SHAPES:
        step = Step(shape)
        for batch in BATCHES:
            step.prepare(batch)
            floor = (step.bytes() + step.caches.nbytes) / limits["copy_GBps"] / 1e6
            step.fused = False
            step.library(False)
            expected = step.logits.clone()
            kinds = ["library", "own" if batch <= 16 else "streamed"]
            for kind, step.fused in product(kinds, (False, True)):
                for overlap in (True,) if kind == "streamed" else (False, True):
                    run = getattr(step, kind)
                    step.logits.fill_(float("nan"))
                    run(overlap)
                    error = float((step.logits.float() - expected.float()).norm() / expected.float().norm())
                    time = microseconds([partial(run, overlap)], window_ms=20.0) / 1e3
                    row = {
                        "model": shape.name,
                        "batch": batch,
                        "kind": kind + ", fused decode" * step.fused,
                        "overlap": overlap,
                        "ms": round(time, 4),
                        "floor_ms": round(floor, 4),
                        "difference": round(error, 5),
                    }
                    results.append(row)
                    print(row, flush=True)
        del step
        torch.cuda.empty_cache()
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report = {"versions": versions, "ceilings": limits, "results": results}
    (arguments.out / "kernels_step.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = ["| model | batch | products | overlapped | ms | floor ms | difference |", "| --- " * 7 + "|"]
    lines += [
        f"| {row['model']} | {row['batch']} | {row['kind']} | {'yes' if row['overlap'] else 'no'} | {row['ms']} "
        f"| {row['floor_ms']} | {row['difference']:.1e} |"
        for row in results
    ]
    (arguments.out / "kernels_step.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

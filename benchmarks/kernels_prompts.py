"""The layers of a step with prompts by step size: ``python -m benchmarks.kernels_prompts --out DIR``.

8,192 tokens, as prompts of 128, go through all layers in steps of 1,024 to 8,192 tokens: products alone, and with the
kernels between them. One CUDA graph each, several tenths of a second long, because the card clocks down under products
that go on for so long. Beside it each product and kernel alone, over a few milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.kernels_step import BLOCK, EPS, HEAD_DIM, KV_HEADS, SHAPES, Step
from benchmarks.kernels_timing import ceilings, microseconds
from pagedlc_engine.kernels.activation import silu_mul
from pagedlc_engine.kernels.attention_plan import AttentionGeometry, plan_attention
from pagedlc_engine.kernels.norm import add_rms_norm

TOKENS, PROMPT = 8192, 128
SIZES = (1024, 2048, 4096, 8192)


class PromptStep(Step):
    """All layers over one step of prompts."""

    def prepare(self, batch: int) -> None:
        """Make inputs of ``batch`` tokens."""
        prompts, pages = batch // PROMPT, PROMPT // BLOCK
        self.caches = torch.zeros(
            (self.shape.layers, 2, prompts * pages, BLOCK, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda"
        )
        tables = np.random.default_rng(0).permutation(prompts * pages).astype(np.int32).reshape(prompts, pages)
        slots = (tables[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(-1).astype(np.int32)
        lengths = np.full(prompts, PROMPT, np.int32)
        geometry = AttentionGeometry(self.shape.heads, KV_HEADS, HEAD_DIM, BLOCK)
        self.plan = plan_attention(lengths, lengths, tables, slots, geometry, torch.device("cuda"))
        self.positions = torch.arange(batch, device="cuda") % PROMPT
        self.hidden = torch.randn((batch, self.shape.hidden), device="cuda").bfloat16()
        self.stream = torch.randn((batch, self.shape.hidden), device="cuda").bfloat16()
        self.attended = torch.randn((batch, self.shape.heads * HEAD_DIM), device="cuda").bfloat16()
        self.gated = torch.randn((batch, self.shape.intermediate), device="cuda").bfloat16()

    def products(self) -> None:
        """The four products of every layer."""
        for layer in self.layers:
            torch.mm(self.hidden, layer["qkv"].t())
            torch.mm(self.attended, layer["o"].t())
            torch.mm(self.hidden, layer["gate_up"].t())
            torch.mm(self.gated, layer["down"].t())

    def whole(self) -> None:
        """Everything."""
        for index, layer in enumerate(self.layers):
            attended = self.attend(index, torch.mm(self.hidden, layer["qkv"].t()), True)
            product = torch.mm(attended, layer["o"].t())
            add_rms_norm(product, self.stream, layer["norm2"], EPS, out=self.hidden, overlap=True)
            gated = silu_mul(torch.mm(self.hidden, layer["gate_up"].t()), overlap=True)
            product = torch.mm(gated, layer["down"].t())
            add_rms_norm(product, self.stream, layer["norm1"], EPS, out=self.hidden, overlap=True)

    def parts(self) -> dict[str, float]:
        """Microseconds of each kernel alone, over six layers' weights."""
        some = list(enumerate(self.layers))[:6]
        inputs = {"qkv": self.hidden, "o": self.attended, "gate_up": self.hidden, "down": self.gated}
        found = {
            name: microseconds([lambda x=x, w=layer[name]: torch.mm(x, w.t()) for _, layer in some])  # type: ignore[misc]
            for name, x in inputs.items()
        }
        projected = torch.mm(self.hidden, self.layers[0]["qkv"].t())
        gate_up = torch.mm(self.hidden, self.layers[0]["gate_up"].t())
        norm = self.layers[0]["norm1"]
        calls: dict[str, list[Callable[[], object]]] = {
            "add + norm": [lambda: add_rms_norm(self.hidden, self.stream, norm, EPS, out=self.hidden)] * 6,
            "silu * up": [lambda: silu_mul(gate_up)] * 4,
            "q/k norm, rotation, cache and attention": [lambda i=i: self.attend(i, projected, True) for i, _ in some],
        }
        return {**found, **{name: microseconds(group) for name, group in calls.items()}}


def repeated_ms(step: Callable[[], None], count: int) -> float:
    """Milliseconds of ``count`` steps as one graph, the better of two."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            step()
    graph.replay()
    times = []
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    limits = ceilings()
    rows = []
    for shape in SHAPES:
        step = PromptStep(shape)
        for size in SIZES:
            step.prepare(size)
            rows.append(
                {
                    "model": shape.name,
                    "step": size,
                    "products_ms": round(repeated_ms(step.products, TOKENS // size), 2),
                    "all_ms": round(repeated_ms(step.whole, TOKENS // size), 2),
                    "us": {name: round(value, 1) for name, value in step.parts().items()},
                }
            )
            print(rows[-1], flush=True)
        del step
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "kernels_prompts.json").write_text(json.dumps({"ceilings": limits, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

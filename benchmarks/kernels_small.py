"""The fused small kernels and sampling on one GPU, beside torch's own operations and the copy bandwidth.

``PYTHONPATH=.:engine python -m benchmarks.kernels_small --out DIR``. bf16; sizes of Qwen3-0.6B and Qwen3-8B.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels_timing import ceilings, microseconds
from pagedlc_engine.kernels.activation import silu_mul
from pagedlc_engine.kernels.embedding import embed
from pagedlc_engine.kernels.norm import add_rms_norm
from pagedlc_engine.kernels.rope_cache import norm_rope_cache
from pagedlc_engine.kernels.sampling import sample_tokens

VOCABULARY = 151936
Make = Callable[[], Callable[[], object]]


def random(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def norm_case(tokens: int, size: int, overlap: bool) -> tuple[str, float, Make]:
    def make() -> Callable[[], object]:
        hidden, residual, out = random(tokens, size), random(tokens, size), random(tokens, size)
        weight = random(size)
        return lambda: add_rms_norm(hidden, residual, weight, 1e-6, out=out, overlap=overlap)

    return f"add + norm {tokens} x {size}{', overlapped' * overlap}", tokens * size * 2.0 * 4, make


def rope_case(tokens: int, heads: int, overlap: bool) -> tuple[str, float, Make]:
    width = (heads + 16) * 128
    rotation = torch.rand(40960, 128, device="cuda")

    def make() -> Callable[[], object]:
        projected, query, gains = random(tokens, width), random(tokens, heads, 128), random(2, 128)
        caches = random(2, max(256, -(-tokens // 64)), 64, 8, 128)
        positions = torch.randint(0, 8192, (tokens,), device="cuda")
        slots = torch.randperm(caches.shape[1] * 64, device="cuda")[:tokens].int()
        return lambda: norm_rope_cache(
            projected, gains[0], gains[1], rotation, positions, slots, caches[0], caches[1], heads, query=query,
            overlap=overlap,
        )  # fmt: skip

    return f"norm + rope + cache {tokens} x {heads} heads{', overlapped' * overlap}", tokens * width * 2.0 * 2, make


def silu_case(tokens: int, size: int, overlap: bool) -> tuple[str, float, Make]:
    def make() -> Callable[[], object]:
        gate_up, out = random(tokens, 2 * size), random(tokens, size)
        return lambda: silu_mul(gate_up, out=out, overlap=overlap)

    return f"silu * up {tokens} x {size}{', overlapped' * overlap}", tokens * size * 2.0 * 3, make


def embed_case(tokens: int, size: int) -> tuple[str, float, Make]:
    table = random(VOCABULARY, size)

    def make() -> Callable[[], object]:
        ids, out = torch.randint(0, VOCABULARY, (tokens,), device="cuda"), random(tokens, size)
        return lambda: embed(ids, table, out=out)

    return f"embedding {tokens} x {size}", tokens * size * 2.0 * 2, make


def sample_case(rows: int, kind: str) -> tuple[str, float, Make]:
    temperatures = torch.full((rows,), 0.8, device="cuda")
    seeds, counters = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda")

    def make() -> Callable[[], object]:
        logits = torch.randn(rows, VOCABULARY, device="cuda")
        out = torch.empty(rows, dtype=torch.int64, device="cuda")
        return {
            "argmax": lambda: sample_tokens(logits, None, None, None, out=out),
            "draw": lambda: sample_tokens(logits, temperatures, seeds, counters, out=out),
            "torch argmax": lambda: logits.argmax(-1),
            "torch softmax + multinomial": lambda: (logits / temperatures[:, None]).softmax(-1).multinomial(1),
        }[kind]

    return f"{kind} {rows} x {VOCABULARY}", rows * VOCABULARY * 4.0, make


def cases() -> list[tuple[str, float, Make]]:
    result = []
    for overlap in (False, True):
        for tokens, size in ((1, 1024), (64, 1024), (1, 4096), (64, 4096), (8192, 4096)):
            result.append(norm_case(tokens, size, overlap))
        for tokens, heads in ((1, 16), (64, 16), (1, 32), (64, 32), (8192, 32)):
            result.append(rope_case(tokens, heads, overlap))
        for tokens, size in ((1, 3072), (64, 3072), (64, 12288), (8192, 12288)):
            result.append(silu_case(tokens, size, overlap))
    result += [embed_case(64, 4096), embed_case(8192, 4096)]
    for rows in (1, 8, 64, 256):
        result += [
            sample_case(rows, kind) for kind in ("argmax", "draw", "torch argmax", "torch softmax + multinomial")
        ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    limits = ceilings()
    results: list[dict[str, Any]] = []
    for name, size, make in cases():
        calls = [make() for _ in range(max(4, min(32, int(200e6 / size) + 1)))]
        time = microseconds(calls, window_ms=2.0)
        bandwidth = size / time / 1e3
        results.append(
            {"case": name, "us": round(time, 2), "GBps": round(bandwidth), "of_copy": bandwidth / limits["copy_GBps"]}
        )
        del calls
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report = {"versions": versions, "ceilings": limits, "results": results}
    (arguments.out / "kernels_small.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = ["| case | µs | GB/s | of copy |", "| --- | --- | --- | --- |"]
    lines += [f"| {row['case']} | {row['us']} | {row['GBps']} | {row['of_copy']:.0%} |" for row in results]
    (arguments.out / "kernels_small.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

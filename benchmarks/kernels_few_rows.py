"""Products with one to 128 rows on one GPU, beside cuBLAS: ``python -m benchmarks.kernels_few_rows --out DIR``.

Weights of Qwen3-0.6B and Qwen3-8B, rotating over more than the L2 cache. Each launch by itself: what a product gains
in an overlapped chain, and what its gate would cost cuBLAS, is in ``benchmarks.kernels_step``. ``--compile I/N`` only
fills Triton's cache.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels_timing import ceilings, microseconds
from pagedlc_engine.kernels.few_rows import RowsConfig, few_rows_linear
from pagedlc_engine.kernels.streamed_rows import SplitSums, StreamConfig

# Name, outputs, inputs, gated.
WEIGHTS = [
    ("0.6B qkv", 4096, 1024, False),
    ("0.6B o", 1024, 2048, False),
    ("0.6B gate_up", 3072, 1024, True),
    ("0.6B down", 1024, 3072, False),
    ("0.6B lm_head", 151936, 1024, False),
    ("8B qkv", 6144, 4096, False),
    ("8B o", 4096, 4096, False),
    ("8B gate_up", 12288, 4096, True),
    ("8B down", 4096, 12288, False),
]
ONE_ROW = [RowsConfig(rows, warps) for rows in (1, 2, 4, 8, 16) for warps in (2, 4, 8)]
SEVERAL = [
    StreamConfig(block, step, splits, stages, 4)
    for block, step, stages in ((32, 128, 4), (32, 128, 8), (64, 128, 4), (64, 128, 6), (64, 64, 4), (128, 64, 4))
    for splits in (1, 2, 4, 8)
]


def choices(rows: int, size: int, depth: int, gated: bool) -> list[RowsConfig | StreamConfig | None]:
    """The built-in rule (``None``), and what else could do."""
    if rows == 1:
        held = depth * (2 if gated else 1)
        return [
            None,
            *(config for config in ONE_ROW if 1024 <= held * config.rows <= 65536 and size // config.rows >= 128),
        ]
    return [
        None,
        *(
            config
            for config in SEVERAL
            if depth % (config.splits * config.step) == 0
            and (config.splits == 1 or (not gated and 64 <= size // config.block * config.splits <= 600))
            and size // config.block * config.splits >= 32
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile", default="", metavar="I/N")
    arguments = parser.parse_args()
    index, count = map(int, arguments.compile.split("/")) if arguments.compile else (0, 1)
    limits = {} if arguments.compile else ceilings()
    meeting = SplitSums(torch.device("cuda"))
    results: list[dict[str, Any]] = []
    job = 0
    for name, size, depth, gated in WEIGHTS:
        height = size * (2 if gated else 1)
        copies = 1 if arguments.compile else max(3, int(300e6 / (height * depth * 2)) + 1)
        weights = [
            torch.empty((height, depth), dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for _ in range(copies)
        ]
        for rows in (1, 2, 8, 16, 32, 64, 128):
            x = torch.randn((rows, depth), device="cuda").bfloat16()
            gain = torch.rand(depth, device="cuda").bfloat16() if rows == 1 else None
            out = torch.empty((rows, size), dtype=torch.bfloat16, device="cuda")
            plain = torch.empty((rows, height), dtype=torch.bfloat16, device="cuda")
            timed = []
            for config in choices(rows, size, depth, gated):
                job += 1
                if job % count != index:
                    continue

                call = partial(few_rows_linear, x, gain=gain, gated=gated, out=out, split_sums=meeting, config=config)
                try:
                    if arguments.compile:
                        call(weight=weights[0])
                        continue
                    calls = [partial(call, weight=weight) for weight in weights]
                    timed.append((microseconds(calls, repeats=5, window_ms=1.0), str(config)))
                except Exception as error:  # a choice that does not fit the card must not end the run
                    print("failed:", name, rows, config, repr(error)[:200], flush=True)
            if arguments.compile:
                continue
            library = microseconds(
                [partial(torch.mm, x, weight.t(), out=plain) for weight in weights],
                window_ms=1.0,
            )
            best = min(timed)
            share = height * depth * 2 / timed[0][0] / 1e3 / limits["copy_GBps"]
            row = {"weight": name, "rows": rows, "cublas_us": round(library, 2), "us": round(timed[0][0], 2),
                   "of_copy": round(share, 3), "best_us": round(best[0], 2), "best": best[1]}  # fmt: skip
            results.append(row)
            print(row, flush=True)
        del weights
    if arguments.compile:
        return
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report = {"versions": versions, "ceilings": limits, "results": results}
    (arguments.out / "kernels_few_rows.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = ["| weight | rows | cuBLAS µs | ours µs | of copy | best tried µs |", "| --- " * 6 + "|"]
    lines += [
        f"| {row['weight']} | {row['rows']} | {row['cublas_us']} | {row['us']} | {row['of_copy']:.0%} "
        f"| {row['best_us']} |"
        for row in results
    ]
    (arguments.out / "kernels_few_rows.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Attention kernels on one GPU: achieved share of copy bandwidth or matrix rate.

``PYTHONPATH=.:engine python -m benchmarks.kernels_attention --out DIR`` measures the cases below with the engine's own
decisions, and beside them with the kernels that need no Hopper GPU; ``--tune`` also tries other compile-time choices of
those; ``--compile i/n`` only fills Triton's cache with every n-th variant, so that several processes can do it at once.
bf16, 8 KV heads unless said, head size 128, permuted blocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.kernels_timing import ceilings, microseconds
from pagedlc_engine.kernels import attention_plan, paged_attention
from pagedlc_engine.kernels.attention_plan import AttentionGeometry, AttentionPlan, plan_attention
from pagedlc_engine.kernels.paged_attention import AttentionConfig
from pagedlc_engine.kernels.paged_attention_reference import paged_attention_reference

HEAD_DIM = 128
ROTATED_BYTES = 300e6


@dataclass(frozen=True)
class Case:
    """A step to time. ``shared`` leading tokens are the same blocks for every request."""

    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    block_size: int = 64
    shared: int = 0
    share_prefixes: bool = True

    def flops(self) -> float:
        """Products of visible query/key pairs only."""
        pairs = sum(q * c - q * (q - 1) / 2 for q, c in zip(self.queries, self.contexts, strict=True))
        return 4.0 * pairs * self.heads * HEAD_DIM

    def cache_bytes(self) -> float:
        """Keys and values, those of the shared prefix once."""
        tokens = self.shared + sum(context - self.shared for context in self.contexts)
        return tokens * self.kv_heads * HEAD_DIM * 4.0


def decode(name: str, contexts: list[int], **options: Any) -> Case:
    return Case(name, (1,) * len(contexts), tuple(contexts), **options)


def random_lengths(count: int, low: int, high: int) -> list[int]:
    return [int(length) for length in np.random.default_rng(5).integers(low, high + 1, count)]


CASES = [
    decode("decode 64 x 2200", [2200] * 64),
    decode("decode 64 x 2200, block 16", [2200] * 64, block_size=16),
    decode("decode 130 x 800, 16 heads", [800] * 130, heads=16),
    decode("decode 32 x 8300", [8300] * 32),
    decode("decode 1 x 8192", [8192]),
    decode("decode 1 x 640", [640]),
    decode("decode 8 x 640", [640] * 8),
    decode("decode 130 x 100..1500, 16 heads", random_lengths(130, 100, 1500), heads=16),
    decode("decode 32 x 200..8200", random_lengths(32, 200, 8200)),
    Case("prompt 8192", (8192,), (8192,)),
    Case("prompt 8192, block 16", (8192,), (8192,), block_size=16),
    Case("prompt 8192, 16 heads", (8192,), (8192,), heads=16),
    Case("chunk 2048 at 8192", (2048,), (10240,)),
    Case("chunk 512 at 8192", (512,), (8704,)),
    Case("tail 64 at 8192", (64,), (8256,)),
    Case("tail 16 at 8192", (16,), (8208,)),
    Case("chunk 2048 at 8192, 16 heads", (2048,), (10240,), heads=16),
    Case("prompt 8192, 28 heads, 4 KV heads", (8192,), (8192,), heads=28, kv_heads=4),
    Case("32 prompts x 100 at 8192, shared", (100,) * 32, (8292,) * 32, shared=8192),
    Case("16 prompts x 512", (512,) * 16, (512,) * 16),
    Case("mixed: 64 decode x 1024, chunk 2048 at 4096", (1,) * 64 + (2048,), (1024,) * 64 + (6144,)),
]
# Requests, tokens shared, tokens of their own, query heads.
SHARED = [
    (32, 8192, 108, 32),
    (64, 2048, 192, 32),
    (64, 2048, 192, 16),
    (64, 2048, 1500, 32),
    (32, 2048, 192, 32),
    (16, 2048, 192, 32),
    (8, 2048, 192, 32),
    (4, 2048, 192, 32),
    (64, 512, 300, 32),
    (32, 512, 300, 32),
    (8, 8192, 108, 32),
    (4, 8192, 108, 32),
]
for count, shared, own, heads in SHARED:
    for share in (True, False):
        suffix = "prefix pass" if share else "plain"
        CASES.append(
            decode(
                f"shared {count} x ({shared} + {own}), {heads} heads, {suffix}",
                [shared + own] * count,
                heads=heads,
                shared=shared,
                share_prefixes=share,
            )
        )

# What --tune tries: a name, the constants of the plan that change, and the choice for wide or narrow tiles.
Trial = tuple[str, dict[str, int], AttentionConfig]
CAPPED = AttentionConfig(64, 8, 2, bulk_copy=True, max_registers=128)
NARROW: list[Trial] = [
    ("keys 64, 3 stages", {}, AttentionConfig(64, 4, 3)),
    ("keys 64, 5 stages", {}, AttentionConfig(64, 4, 5)),
    ("keys 32, 5 stages", {}, AttentionConfig(32, 4, 5)),
    ("bulk, 2 warps", {}, AttentionConfig(64, 2, 4, bulk_copy=True)),
]
WIDE: list[Trial] = [
    ("bulk", {}, CAPPED),
    ("bulk, all registers", {}, AttentionConfig(64, 8, 2, bulk_copy=True)),
    ("bulk, 4 warps", {}, AttentionConfig(64, 4, 2, bulk_copy=True)),
    ("pointers, 3 stages", {}, AttentionConfig(64, 8, 3, max_registers=128)),
    ("pointers, 5 stages", {}, AttentionConfig(64, 8, 5)),
    ("pointers, 5 stages, split 1024", {"WIDE_SPLIT": 1024}, AttentionConfig(64, 8, 5)),
]
SHARED_PASS: list[Trial] = [
    (f"{rows} rows, split {split}, {name}", {"SHARED_ROWS": rows, "SHARED_SPLIT": split}, config)
    for rows, split, name, config in (
        (128, 128, "bulk", CAPPED),
        (128, 128, "pointers 5", AttentionConfig(64, 8, 5)),
        (128, 256, "pointers 5", AttentionConfig(64, 8, 5)),
        (64, 128, "pointers 3", AttentionConfig(64, 4, 3)),
        (64, 128, "pointers 5", AttentionConfig(64, 4, 5)),
        (64, 256, "pointers 5", AttentionConfig(64, 4, 5)),
    )
]


@dataclass
class Prepared:
    case: Case
    query: torch.Tensor
    caches: list[torch.Tensor]
    tables: np.ndarray[Any, np.dtype[np.int32]]
    plan: AttentionPlan = field(init=False)
    out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.full_like(self.query, float("nan"))
        self.make_plan()

    def make_plan(self) -> None:
        lengths = np.array(self.case.queries), np.array(self.case.contexts)
        slots = np.zeros(len(self.query), np.int32)
        saved = 1 if self.case.share_prefixes and self.case.shared else 1 << 60
        with mock.patch.object(attention_plan, "MIN_SAVED_BYTES", saved):
            self.plan = plan_attention(*lengths, self.tables, slots, geometry(self.case), self.query.device)

    def call(self, index: int) -> Callable[[], object]:
        keys, values = self.caches[index]
        return lambda: paged_attention.paged_attention(
            self.query, keys, values, self.plan, scale=HEAD_DIM**-0.5, out=self.out
        )

    def microseconds(self) -> float:
        return microseconds([self.call(index) for index in range(len(self.caches))])

    def error(self) -> float:
        self.out.fill_(float("nan"))
        self.call(0)()
        keys, values = self.caches[0]
        # The first and the last requests are enough, and all the reference has memory for.
        worst = 0.0
        starts = np.cumsum(self.case.queries) - self.case.queries
        for row in {0, len(self.case.queries) - 1}:
            length = min(self.case.queries[row], 256)
            first = int(starts[row]) + self.case.queries[row] - length
            one = plan_attention(
                np.array([length]), np.array([self.case.contexts[row]]),
                self.plan.block_tables[row : row + 1].cpu().numpy(), np.zeros(length, np.int32), geometry(self.case),
                torch.device("cuda"),
            )  # fmt: skip
            rows = slice(first, first + length)
            expected = paged_attention_reference(self.query[rows], keys, values, one, scale=HEAD_DIM**-0.5)
            difference = (self.out[rows].double() - expected).norm() / expected.norm()
            worst = max(worst, float(difference.nan_to_num(9.0)))
        return worst


def general() -> AbstractContextManager[object]:
    """Meanwhile the kernels for all cards serve prompts and prefix passes, too, not the one for Hopper."""
    return mock.patch.object(paged_attention, "can_specialize_warps", return_value=False)


def geometry(case: Case) -> AttentionGeometry:
    return AttentionGeometry(case.heads, case.kv_heads, HEAD_DIM, case.block_size)


def prepare(case: Case, *, small: bool = False) -> Prepared:
    size = case.block_size
    shared = case.shared // size
    own = [-(-context // size) - shared for context in case.contexts]
    blocks = shared + sum(own)
    order = np.random.default_rng(1).permutation(blocks).astype(np.int32)
    tables = np.zeros((len(own), shared + max(own)), np.int32)
    tables[:, :shared] = order[:shared]
    used = shared
    for row, count in enumerate(own):
        tables[row, shared : shared + count] = order[used : used + count]
        used += count
    copies = 1 if small else max(2, int(ROTATED_BYTES / case.cache_bytes()) + 1)
    caches = [
        torch.empty((2, blocks, size, case.kv_heads, HEAD_DIM), dtype=torch.bfloat16, device="cuda").normal_()
        for _ in range(copies)
    ]
    query = torch.randn((sum(case.queries), case.heads, HEAD_DIM), device="cuda").bfloat16()
    return Prepared(case, query, caches, tables)


def measure(case: Case, limits: dict[str, float], prepared: Prepared | None = None) -> dict[str, Any]:
    prepared = prepared or prepare(case)
    error = prepared.error()
    time = prepared.microseconds()
    with general():
        other = prepared.microseconds()
    bandwidth, rate = case.cache_bytes() / time / 1e3, case.flops() / time / 1e6
    return {
        "case": case.name,
        "us": round(time, 2),
        "general_us": round(other, 2),
        "GBps": round(bandwidth),
        "TFLOPs": round(rate, 1),
        "of_copy": round(bandwidth / limits["copy_GBps"], 3),
        "of_matmul": round(rate / limits["matmul_TFLOPs"], 3),
        "error": round(error, 5),
        "splits": [table.splits for table in prepared.plan.tables],
    }


def trials(case: Case) -> list[Trial]:
    if case.shared and not case.share_prefixes:
        return []
    if case.shared:
        return SHARED_PASS if max(case.queries) == 1 else WIDE
    return [
        trial
        for trial in (WIDE if max(case.queries) > 16 else NARROW)
        if case.block_size >= trial[2].keys or not trial[2].bulk_copy
    ]


def patched(trial: Trial, is_wide: bool) -> ExitStack:
    """Puts a trial's choices in place of the engine's."""
    _, constants, config = trial
    choose = paged_attention.choose_config

    def chosen(rows: int, *rest: Any) -> AttentionConfig:
        return config if (rows > 32) == is_wide else choose(rows, *rest)

    stack = ExitStack()
    stack.enter_context(general())
    for name, value in constants.items():
        stack.enter_context(mock.patch.object(attention_plan, name, value))
    stack.enter_context(mock.patch.object(paged_attention, "choose_config", chosen))
    return stack


def tune(cases: list[Case], limits: dict[str, float], shard: tuple[int, int] | None) -> list[dict[str, Any]]:
    results = []
    job = 0
    for case in cases:
        prepared = prepare(case, small=shard is not None)
        for trial in trials(case):
            job += 1
            if shard is not None and job % shard[1] != shard[0]:
                continue
            with patched(trial, max(case.queries) > 16 or case.shared > 0):
                try:
                    prepared.make_plan()
                    if shard is not None:
                        prepared.call(0)()
                    else:
                        results.append({"trial": trial[0], **measure(case, limits, prepared)})
                        print(results[-1], flush=True)
                except Exception as error:  # a choice that does not fit the card must not end the run
                    print("failed:", case.name, trial[0], repr(error)[:200], flush=True)
    return results


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| case | µs | general kernels | GB/s | of copy | TFLOP/s | of matmul | error |", "| --- " * 8 + "|"]
    lines += [
        f"| {row['case']} | {row['us']} | {row['general_us']} | {row['GBps']} | {row['of_copy']:.0%} | {row['TFLOPs']} "
        f"| {row['of_matmul']:.0%} | {row['error']:.1e} |"
        for row in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="kernels_attention")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", default="", metavar="I/N")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name]
    if arguments.compile:
        index, count = map(int, arguments.compile.split("/"))
        tune(cases, {}, (index, count))
        return
    limits = ceilings()
    results = [measure(case, limits) for case in cases]
    tuned = tune(cases, limits, None) if arguments.tune else []
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report = {"versions": versions, "ceilings": limits, "results": results, "tuned": tuned}
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    measured = f"copy {limits['copy_GBps']:.0f} GB/s, matmul {limits['matmul_TFLOPs']:.0f} TFLOP/s"
    text = f"Ceilings: {measured}\n\n{table(results)}\n"
    (arguments.out / f"{arguments.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

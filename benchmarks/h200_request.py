"""Where the time of one request goes: `LLM.generate` of a long prompt and one token of answer, mark by mark.

python -m benchmarks.h200_request MODEL_FOLDER OUT.json [--tokens 8192] [--repeats 20]

Each of the prompts is asked for twice, the first time with nothing cached, the second time with all of it: once around
with nothing but the clock, and once more with marks, whose medians are written: milliseconds from the call, and since
the mark before. The GPU's own time is that of the graphs. Only the graphs that are needed are captured, and weights are
random, so that it starts quickly.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload_adapter import with_tokenizer
from pagedlc import LLM, SamplingParams
from pagedlc_engine import loop
from pagedlc_engine.client import EngineClient, Mailbox
from pagedlc_engine.cuda.packer import StepPacker
from pagedlc_engine.cuda.runner import CudaRunner, PendingStep
from pagedlc_engine.cuda.runtime import Graph
from pagedlc_engine.cuda.shapes import ShapeBook
from pagedlc_engine.loop import EngineThread
from pagedlc_engine.scheduler import Scheduler

#: What is marked: whose method, and the names of its beginning and its end.
MARKED: list[tuple[Any, str, str | None, str | None]] = [
    (LLM, "_prepare", None, "prompt prepared"),
    (EngineThread, "send", "prompt hashed, request sent", None),
    (Mailbox, "take", "caller waits", "caller woke"),
    (loop, "_obey", "engine woke", "request queued"),
    (Scheduler, "schedule", None, "scheduled"),
    (StepPacker, "pack", "packing", "packed"),
    (CudaRunner, "_admit", None, "request told to the GPU"),
    (Graph, "launch", None, "launched"),
    (CudaRunner, "execute", None, "executed"),
    (PendingStep, "get", "engine waits", "result read"),
    (Scheduler, "update", None, "answer finished"),
    (EngineClient, "_deliver", None, "delivered"),
]


class Timeline:
    """Notes when what happened, and the GPU's time, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.marks: list[tuple[str, float]] = []
        self.graphs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for owner, name, begin, end in MARKED:
            setattr(owner, name, self._marked(getattr(owner, name), begin, end))
        Graph.launch = self._timed(Graph.launch)  # type: ignore[method-assign]

    def _marked(self, inner: Callable[..., Any], begin: str | None, end: str | None) -> Callable[..., Any]:
        def marked(*arguments: Any, **options: Any) -> Any:
            self._note(begin)
            result = inner(*arguments, **options)
            self._note(end)
            return result

        return marked

    def _timed(self, launch: Callable[..., None]) -> Callable[..., None]:
        def timed(graph: Graph, stream: Any) -> None:
            if not self.on:
                launch(graph, stream)
                return
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            launch(graph, stream)
            end.record()
            self.graphs.append((begin, end))

        return timed

    def _note(self, name: str | None) -> None:
        if self.on and name is not None:
            self.marks.append((name, time.perf_counter()))

    def gpu_seconds(self) -> float:
        """Of the graphs noted."""
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self.graphs)) / 1e3


def few_shapes(book: ShapeBook, tokens: int) -> list[Any]:
    """The launch sizes of a prompt of ``tokens`` tokens, of its last ones, and of one token."""
    sizes = sorted({next(size for size in book.mixed_sizes if size >= least) for least in (tokens, 64)})
    mixed = [book.mixed_shape(size, *variant) for size in reversed(sizes) for variant in book._variants(size)]
    decodes = [book.decode(1, split=split, shared=False) for split in (False, True)]
    return list(dict.fromkeys(shape for shape in [*mixed, *decodes] if shape is not None))


def ask(llm: LLM, prompt: list[int]) -> tuple[float, float]:
    """One request; its beginning and its end."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt}], [params], use_tqdm=False)
    return begin, time.perf_counter()


def measure(llm: LLM, prompts: list[list[int]], timeline: Timeline) -> dict[str, Any]:
    """All prompts, cold and warm, without marks and with them."""
    report: dict[str, Any] = {"cold": {"rows": []}, "warm": {"rows": []}}
    for timeline.on in (False, True):
        llm.reset_prefix_cache()
        for prompt in prompts:
            for each in report.values():
                timeline.marks.clear()
                timeline.graphs.clear()
                begin, end = ask(llm, prompt)
                if timeline.on:
                    each["rows"].append((begin, end, list(timeline.marks), timeline.gpu_seconds()))
                else:
                    each.setdefault("all_ms", []).append(round((end - begin) * 1e3, 3))
    for each in report.values():
        rows = each.pop("rows")
        each |= {"median_ms": statistics.median(each["all_ms"]), "gpu_ms": _ms([row[3] for row in rows])}
        each["marks"] = _medians(rows)
    return report


def _medians(rows: list[tuple[float, float, list[tuple[str, float]], float]]) -> list[tuple[str, float, float]]:
    """Name, time from the call and time since the mark before, of every mark in the order they came."""
    times: dict[str, list[tuple[float, float]]] = {}
    for begin, end, marks, _ in rows:
        last, seen = begin, Counter[str]()
        for name, at in [*sorted(marks, key=lambda mark: mark[1]), ("returned", end)]:
            seen[name] += 1
            key = name if seen[name] == 1 else f"{name} ({seen[name]})"
            times.setdefault(key, []).append((at - begin, at - last))
            last = at
    found = [(key, *(_ms(list(values)) for values in zip(*pairs, strict=True))) for key, pairs in times.items()]
    return sorted(found, key=lambda item: item[1])  # type: ignore[arg-type]


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    ShapeBook.captured = lambda book: few_shapes(book, arguments.tokens)  # type: ignore[method-assign,assignment]
    timeline = Timeline()
    folder = with_tokenizer(arguments.model)
    llm = LLM(folder, load_format="dummy", max_model_len=2 * arguments.tokens, block_size=64, seed=0).load()
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(arguments.tokens)] for _ in range(arguments.repeats)]
    for prompt in prompts[:3]:
        ask(llm, prompt)
        ask(llm, prompt)
    report = measure(llm, prompts, timeline)
    for title, each in report.items():
        print(f"{title}: {each['median_ms']} ms, of which GPU {each['gpu_ms']}")
        for name, at, since in each["marks"]:
            print(f"  {name:32}{at:9.3f}{since:9.3f}")
    known = {"model": arguments.model.name, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    arguments.out.write_text(json.dumps({**known, "tokens": arguments.tokens, **report}, indent=1) + "\n")
    llm.close()


if __name__ == "__main__":
    main()

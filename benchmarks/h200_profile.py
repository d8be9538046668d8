"""What the GPU does in a step, kernel by kernel, and how long it has nothing to do between steps.

python -m benchmarks.h200_profile MODEL_FOLDER OUT.json [--scenes decode1,decode64,prompt,warm,document]

The engine steps on its own under torch's profiler. A step begins with the kernel that unpacks its description, so the
trace is cut there. Per scene, medians over the steps of one kind: the time from a step's first kernel to its last one's
end, the gap before the next step's first kernel, and every kernel's share. Overlapped kernels (programmatic dependent
launch) count from their launch, so that shares can add up to more than the step. The profiler itself makes small
kernels a little slower: compare within a run.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload_adapter import with_tokenizer
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.engine import Engine, build_engine
from pagedlc_engine.model import read_spec
from pagedlc_engine.request import Request, SamplingParams

FIRST = "unpack_kernel"
DOCUMENT = 8192


@dataclass
class Step:
    """Kernels of one step: name, start and duration in µs; and the time to the next step's first, if one follows."""

    kernels: list[tuple[str, float, float]] = field(default_factory=list)
    gap: float | None = None

    @property
    def begin(self) -> float:
        """When its first kernel began."""
        return self.kernels[0][1]

    @property
    def end(self) -> float:
        """When its last kernel ended."""
        return max(start + duration for _, start, duration in self.kernels)


class Scenes:
    """Each method brings the engine to a state and yields the steps worth a look."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0
        self._live: list[str] = []

    def add(self, prompt: list[int], max_tokens: int) -> None:
        """One more greedy request."""
        self._number += 1
        name = f"r{self._number}"
        self._live.append(name)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add(Request(name, tuple(prompt), params, whole=True))

    def steps(self, count: int | None = None) -> None:
        """Step on, to the end of all work unless a count is given."""
        while count is None or count > 0:
            if not self._engine.has_work():
                return
            self._engine.step()
            count = None if count is None else count - 1

    def clear(self) -> None:
        """Leave nothing behind."""
        for name in self._live:
            self._engine.abort(name)
        self._live.clear()
        self.steps()
        self._engine.reset_prefix_cache()

    def decode(self, batch: int) -> list[Step]:
        """A batch that decodes at a context of about 400 tokens."""
        for _ in range(batch):
            self.add(_tokens(384), 200)
        self.steps(16 + batch // 4)
        return recorded(lambda: self.steps(12))[2:-2]

    def prompt(self) -> list[Step]:
        """One new prompt of 8,192 tokens."""
        found = []
        for _ in range(3):
            prompt = _tokens(DOCUMENT)
            self.add(prompt, 1)
            found += recorded(self.steps)
        return found

    def warm(self) -> list[Step]:
        """The same prompt again."""
        prompt = _tokens(DOCUMENT)
        self.add(prompt, 1)
        self.steps()
        found = []
        for _ in range(5):
            self.add(prompt, 1)
            found += recorded(self.steps)
        return found

    def document(self, questions: int = 32) -> list[Step]:
        """Questions on one document that is cached: their prompts, then a few tokens of the answers."""
        document = _tokens(DOCUMENT)
        self.add(document, 1)
        self.steps()
        for _ in range(questions):
            self.add([*document, *_tokens(64)], 16)
        return recorded(self.steps)

    def run(self, name: str) -> list[Step]:
        """A scene by name."""
        found = re.fullmatch(r"decode(\d+)", name)
        steps = self.decode(int(found[1])) if found else getattr(self, name)()
        self.clear()
        return steps


def _tokens(count: int) -> list[int]:
    return [random.randrange(10000) for _ in range(count)]


def recorded(work: Any) -> list[Step]:
    """The steps launched by a call."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    steps: list[Step] = []
    for start, duration, name in kernels:
        if name == FIRST:
            steps.append(Step())
        if steps:
            steps[-1].kernels.append((name, start, duration))
    for step, following in pairwise(steps):
        step.gap = following.begin - step.end
    return steps


def summary(steps: list[Step]) -> list[dict[str, Any]]:
    """Steps of one kind (the same kernels, as often) together."""
    kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for at, step in enumerate(steps):
        counts = Counter(name for name, _, _ in step.kernels)
        kinds[tuple(sorted(counts.items()))].append(at)
    return [_kind(steps, places) for places in kinds.values()]


def _kind(steps: list[Step], places: list[int]) -> dict[str, Any]:
    shares: dict[str, list[float]] = defaultdict(list)
    for at in places:
        total: Counter[str] = Counter()
        for name, _, duration in steps[at].kernels:
            total[name] += duration
        for name, taken in total.items():
            shares[name].append(taken)
    counts = Counter(name for name, _, _ in steps[places[0]].kernels)
    gaps = [gap for at in places if (gap := steps[at].gap) is not None]
    rows = sorted(((statistics.median(taken), name) for name, taken in shares.items()), reverse=True)
    return {
        "steps": len(places),
        "step_us": round(statistics.median(steps[at].end - steps[at].begin for at in places), 1),
        "gap_us": round(statistics.median(gaps), 1) if gaps else None,
        "kernels": [{"name": name[:90], "calls": counts[name], "us": round(taken, 1)} for taken, name in rows],
    }


def main() -> None:
    """Profile and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scenes", default="decode1,decode8,decode64,decode256,prompt,warm,document")
    arguments = parser.parse_args()
    random.seed(0)
    folder = with_tokenizer(arguments.model)
    config = EngineConfig.create(model=folder, load_format="dummy", max_model_len=16384, max_num_seqs=256, seed=0)
    engine = build_engine(config, read_spec(folder, "dummy"))
    scenes = Scenes(engine)
    scenes.run("document")  # What happens once only, happens here.
    report: dict[str, Any] = {"model": arguments.model.name, "torch": torch.__version__, "scenes": {}}
    for name in arguments.scenes.split(","):
        report["scenes"][name] = summary(scenes.run(name))
        for kind in report["scenes"][name]:
            print(name, {key: kind[key] for key in ("steps", "step_us", "gap_us")}, flush=True)
            for row in kind["kernels"][:14]:
                print(f"    {row['us']:9.1f} µs {row['calls']:4d} × {row['name'][:80]}")
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

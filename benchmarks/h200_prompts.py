"""Steps with prompts by token budget: what a user waits, and how long the GPU works on each step.

python -m benchmarks.h200_prompts MODEL_FOLDER OUT.json [--budgets 2048,8192]

One engine; per budget one prompt of 8,192 tokens (new, and known), 64 prompts of 128, 32 questions on one document and
64 agents on one system prompt. The engine is stepped here, so that no other thread's time is in the figures. Greedy
answers under the budgets are compared: near-ties apart, they must not depend on how prompts are cut.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload_adapter import with_tokenizer
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.cuda.packer import Packed
from pagedlc_engine.cuda.runner import CudaRunner
from pagedlc_engine.engine import Engine, build_engine
from pagedlc_engine.model import read_spec
from pagedlc_engine.request import Request, SamplingParams

REPEATS = 3
Answers = list[list[int]]


class Stepper:
    """An engine, with events around each step's launches.

    Args:
        engine: On a CUDA device.
    """

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.runner, CudaRunner)
        self.engine = engine
        self.steps: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._launch = engine.runner._run
        self._number = 0
        engine.runner._run = self._timed  # type: ignore[method-assign]

    def _timed(self, packed: Packed, *rest: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        tensors = self._launch(packed, *rest)
        end.record()
        self.steps.append((packed.shape.tokens, begin, end))
        return tensors

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, Answers]:
        """Answer all; milliseconds, and the answers."""
        self._number += 1
        self.steps.clear()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        names = [f"{self._number}/{index}" for index in range(len(prompts))]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add(Request(name, prompt, params, whole=True))
        answers: dict[str, list[int]] = {}
        while self.engine.has_work():
            for delta in self.engine.step():
                if delta.error is not None:
                    raise delta.error
                answers[delta.request_id] = list(delta.token_ids)
        return (time.perf_counter() - start) * 1e3, [answers[name] for name in names]

    def gpu_ms(self) -> list[tuple[int, float]]:
        """Tokens and GPU time of the last run's first steps."""
        torch.cuda.synchronize()
        return [(tokens, round(begin.elapsed_time(end), 3)) for tokens, begin, end in self.steps[:10]]


def tokens(name: str, count: int) -> list[int]:
    """Random, and the same for the same name."""
    source = random.Random(name)
    return [source.randint(0, 10000) for _ in range(count)]


def prompts(what: str, key: str) -> tuple[list[list[int]], int]:
    """Prompts of a case, and how long the answers are."""
    document = tokens("document", 8192)
    cases = {
        "8192": ([tokens(key, 8192)], 1),
        "64 x 128": ([tokens(f"{key}/{row}", 128) for row in range(64)], 1),
        "32 x (8192 shared + 64)": ([document + tokens(f"{key}/{row}", 64) for row in range(32)], 64),
        "64 x (2048 shared + 128)": ([document[:2048] + tokens(f"{key}/{row}", 128) for row in range(64)], 128),
    }
    return cases[what]


def measure(stepper: Stepper, budget: int) -> tuple[dict[str, Any], Answers]:
    """All cases under one budget; the first repeat of shared ones computes what is shared."""
    engine = stepper.engine
    engine.scheduler.max_num_batched_tokens = budget
    found: dict[str, Any] = {}
    for what in ("8192", "8192, known", "64 x 128", "32 x (8192 shared + 64)", "64 x (2048 shared + 128)"):
        if what != "8192, known":
            engine.reset_prefix_cache()
        times = []
        for repeat in range(REPEATS):
            key = "known" if what == "8192, known" else f"{what}/{budget}/{repeat}"
            times.append(round(stepper.run(*prompts(what.partition(",")[0], key))[0], 2))
        found[what] = {"ms": times, "gpu_ms": stepper.gpu_ms()}
        print(budget, what, found[what], flush=True)
    engine.reset_prefix_cache()
    return found, stepper.run([tokens(f"same/{row}", 600 + 97 * row) for row in range(12)], 8)[1]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budgets", default="2048,8192")
    arguments = parser.parse_args()
    folder = with_tokenizer(arguments.model)
    options = {"load_format": "dummy", "max_model_len": 16384, "max_num_seqs": 256, "block_size": 64, "seed": 0}
    config = EngineConfig.create(model=folder, **options)
    stepper = Stepper(build_engine(config, read_spec(folder, "dummy")))
    report: dict[str, Any] = {"model": arguments.model.name, "torch": torch.__version__, "budgets": {}}
    answers = []
    for budget in map(int, arguments.budgets.split(",")):
        report["budgets"][budget], given = measure(stepper, budget)
        answers.append(given)
    report["equal_answers"] = [sum(a == b for a, b in zip(answers[0], other, strict=True)) for other in answers]
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    stepper.engine.close()


if __name__ == "__main__":
    main()

"""The workloads of an engine-neutral file while other threads of the program keep the interpreter busy.

python -m benchmarks.busy_consumers MODEL_FOLDER OUT.json --workloads FILE [--only W1,W2] [--runs thread/idle,...]

Each host runs the workloads idle and under each load. Loads are 64 threads beside the driver's: ``consumers`` do half a
millisecond of Python and wait 9.5 ms, over and over, which asks for 3.2 interpreters; ``spinning`` never wait.

Figures are what the workload file's own driver sees, in one more thread of the same program: from handing over the
requests until it holds all answers. That thread competes for the interpreter too, so they contain what the load costs
any code. Beside them stands ``engine_seconds``, the longest answer's time from its submission to its last token, by the
engine's clock: it leaves out what the driver does, and waits for, before and after.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.h200_workloads import load, machine
from benchmarks.workload_adapter import WorkloadAdapter, with_tokenizer
from pagedlc import LLM

THREADS = 64
WORK_SECONDS = 0.0005
WAIT_SECONDS = 0.0095
RUNS = "thread/idle,thread/consumers,process/idle,process/consumers,process/spinning"


class TimedAdapter(WorkloadAdapter):
    """A :class:`WorkloadAdapter` that also notes how long the engine took for each ``generate``."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.engine_seconds: list[float] = []
        self.checksum = 0

    def generate(self, native: tuple[Any, Any]) -> list[list[int]]:
        """Complete all prompts; their token ids."""
        outputs = self.llm.generate(*native, use_tqdm=False)
        self.engine_seconds.append(max(output.timings.total_time or 0.0 for output in outputs))
        answers = [output.outputs[0].token_ids for output in outputs]
        self.checksum = zlib.crc32(repr(answers).encode(), self.checksum)
        return answers


@contextmanager
def busy(kind: str) -> Iterator[None]:
    """Keep the interpreter busy meanwhile."""
    ended = threading.Event()
    target = {"consumers": _consume, "spinning": _spin}.get(kind)
    threads = [threading.Thread(target=target, args=(ended,)) for _ in range(THREADS)] if target else []
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _consume(ended: threading.Event) -> None:
    while not ended.is_set():
        until = time.thread_time() + WORK_SECONDS
        while time.thread_time() < until:
            pass
        time.sleep(WAIT_SECONDS)


def _spin(ended: threading.Event) -> None:
    while not ended.is_set():
        for _ in range(1000):
            pass


#: Of each workload: what is compared, and whether more is better.
SHOWN = {
    "W1": (("tokens_per_s", True),),
    "W2": (("ms_per_step", False), ("first_token_ms", False)),
    "W3": (("cold_s", False), ("warm_s", False)),
    "W4": (("cold_s", False), ("warm_s", False)),
    "W5": (("cold_ms", False), ("warm_ms", False)),
    "W6": (("p50_ms", False), ("max_ms", False), ("long_first_token_ms", False)),
}


class Measurement:
    """One host under one load.

    Args:
        workloads: The workload file's module.
        adapter: The loaded engine.
    """

    def __init__(self, workloads: Any, adapter: TimedAdapter) -> None:
        self._workloads = workloads
        self._adapter = adapter
        self._suite = workloads.Suite(adapter, {}, os.devnull, 1)

    def warm_up(self) -> None:
        """Touch the shapes that are timed later."""
        self._suite.warmup()

    def run(self, names: list[str], batches: list[int], w1_reps: int, seconds: float) -> dict[str, Any]:
        """Figures by workload; what would begin after ``seconds`` is left out."""
        end = time.monotonic() + seconds
        found: dict[str, Any] = {}
        for name in names:
            for batch in batches if name == "W2" else [0]:
                if time.monotonic() >= end:
                    return found
                self._workloads.W2_BATCHES = (batch,)
                self._adapter.engine_seconds.clear()
                self._adapter.checksum = 0
                before = self._adapter.llm.stats().num_steps
                begin = time.monotonic()
                figure = f"W2.b{batch}" if name == "W2" else name
                # W6's driver finds no gap to measure where a starved reader gets a stream in one piece.
                with suppress(IndexError):
                    self._suite.run([name], w1_reps)
                found[figure] = {
                    **self._suite.r["figures"].pop(figure, {}),
                    "engine_seconds": list(self._adapter.engine_seconds),
                    "wall_seconds": time.monotonic() - begin,
                    "answers_crc32": self._adapter.checksum,
                    "steps": self._adapter.llm.stats().num_steps - before,
                }
        return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """Every figure as Markdown, with how many times worse than the same host idle."""
    columns = list(results)
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    figures = dict.fromkeys(figure for found in results.values() for figure in found)
    for figure in figures:
        for key, more_is_better in SHOWN[figure[:2]]:
            cells = [_cell(results, column, figure, key, more_is_better) for column in columns]
            lines.append(f"| {figure} {key} | " + " | ".join(cells) + " |")
        cells = [_engine_cell(results[column].get(figure)) for column in columns]
        lines.append(f"| {figure} engine_seconds, in all | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(results: dict[str, dict[str, Any]], column: str, figure: str, key: str, more_is_better: bool) -> str:
    value = results[column].get(figure, {}).get(key)
    idle = results.get(f"{column.split()[0]} idle", {}).get(figure, {}).get(key)
    if value is None:
        return "–"
    if not idle or not value or column.endswith("idle"):
        return f"{value:,.4g}"
    return f"{value:,.4g} ({idle / value if more_is_better else value / idle:.2f} ×)"


def _engine_cell(figure: dict[str, Any] | None) -> str:
    return "–" if figure is None or not figure["engine_seconds"] else f"{sum(figure['engine_seconds']):.3f}"


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--device-info", type=Path)
    parser.add_argument("--only", default="W1,W2,W3,W4,W5,W6")
    parser.add_argument("--batches", default="1,64", help="of W2")
    parser.add_argument("--runs", default=RUNS, help="HOST/LOAD, or HOST/LOAD@SECONDS: workloads begin no later")
    parser.add_argument("--w1-reps", type=int, default=1)
    parser.add_argument("--switch-interval", type=float, default=5.0, help="of the interpreter, in ms")
    parser.add_argument("--options", default="{}", help="JSON of further engine options")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    workloads = load(arguments.workloads)
    options = {
        "load_format": "dummy",
        "max_model_len": 16384,
        "max_num_seqs": 256,
        "block_size": 64,
        "seed": 0,
        **json.loads(arguments.options),
    }
    meta = {
        "model": arguments.model.name,
        "engine_args": options,
        "device": machine(arguments.device_info) if arguments.device_info else {},
        "threads": THREADS,
        "command": " ".join(["python -m benchmarks.busy_consumers", *sys.argv[1:]]),
    }
    sys.setswitchinterval(arguments.switch_interval / 1e3)
    results: dict[str, dict[str, Any]] = {}
    for host, runs in groupby(arguments.runs.split(","), lambda run: run.split("/")[0]):
        begin = time.time()
        llm = LLM(with_tokenizer(arguments.model), **options, engine_host=host).load()
        meta[f"{host} start_s"] = round(time.time() - begin, 1)
        with llm:
            measurement = Measurement(workloads, TimedAdapter(llm))
            measurement.warm_up()
            for run in runs:
                kind, _, seconds = run.split("/")[1].partition("@")
                with busy(kind):
                    results[f"{host} {kind}"] = measurement.run(
                        arguments.only.split(","),
                        [int(batch) for batch in arguments.batches.split(",")],
                        arguments.w1_reps,
                        float(seconds or "inf"),
                    )
                arguments.out.write_text(json.dumps({"meta": meta, "results": results}, indent=1))
                arguments.out.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()

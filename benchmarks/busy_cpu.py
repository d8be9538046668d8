"""The small model on a CPU while other threads of the program keep the interpreter busy, by thread and by process.

python -m benchmarks.busy_cpu OUT.json [--tokens 24] [--repeats 3]

One request, then eight at once, by ``LLM.generate``; the loads are those of ``busy_consumers``. ``user`` is until the
caller, one more thread of the program, has the answers; ``engine`` until the last of them is complete in the engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.busy_consumers import busy
from pagedlc import LLM, SamplingParams

SIZES = (1, 8)


def measure(llm: LLM, size: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds for ``size`` requests at once."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found: dict[str, list[float]] = {"user": [], "engine": []}
    for repeat in range(repeats):
        prompts = [f"Story {size}, {repeat}, {number}:" for number in range(size)]
        begin = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found["user"].append(time.monotonic() - begin)
        found["engine"].append(max(output.timings.total_time or 0.0 for output in outputs))
    return found


def table(results: dict[str, Any]) -> str:
    """Medians as Markdown, and how many times the same host's idle ones they are."""
    lines = ["| | one, user s | one, engine s | eight, user s | eight, engine s |", "| --- | --- | --- | --- | --- |"]
    for name, sizes in results.items():
        idle = results[f"{name.split()[0]} idle"]
        cells = [
            f"{statistics.median(sizes[size][key]):.2f} "
            f"({statistics.median(sizes[size][key]) / statistics.median(idle[size][key]):.1f} ×)"
            for size in map(str, SIZES)
            for key in ("user", "engine")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for host in ("process", "thread"):
        with LLM("smollm2", engine_host=host) as llm:
            measure(llm, 1, 4, 1)
            for load in ("idle", "consumers"):
                with busy(load):
                    results[f"{host} {load}"] = {
                        str(size): measure(llm, size, arguments.tokens, arguments.repeats) for size in SIZES
                    }
                arguments.out.write_text(json.dumps(results, indent=1))
                arguments.out.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()

"""How long an engine takes from the start of Python to its first token, where the time goes, and what it leaves behind.

python -m benchmarks.h200_start MODEL_FOLDER [--utilization 0.9]

Set TRITON_CACHE_DIR to a fresh folder for a first start; run it again for a second. Prints one line of JSON; memory is
in MiB, as the driver sees it, "empty process" being one that has made a tensor and a matrix product and freed both.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

BEGIN = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - float(
    Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK"))  # fmt: skip


def since_start() -> float:
    """Seconds since Python was started."""
    return round(time.time() - BEGIN, 2)


def timed(holder: Any, name: str, times: dict[str, float]) -> None:
    """Let ``holder.name`` add the time it takes to ``times``."""
    inner = getattr(holder, name)

    @functools.wraps(inner)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(*arguments, **named)
        finally:
            times[name] = round(times.get(name, 0.0) + time.perf_counter() - begin, 2)

    setattr(holder, name, wrapper)


def used_mib(torch: Any) -> int:
    """What the card has not free."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free) >> 20


def host_mib() -> dict[str, int]:
    """Peak of the process's memory, mapped files included, and what is its own now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"peak": peak, "own": int(status["RssAnon"].split()[0]) >> 10}


def main() -> None:
    """Start, generate one token, close."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--utilization", type=float, default=0.9)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    found: dict[str, Any] = {"model": arguments.model.name, "python_started_s": since_start()}

    import torch

    from benchmarks.workload_adapter import with_tokenizer
    from pagedlc import LLM, SamplingParams

    found["imported_s"] = since_start()
    folder = with_tokenizer(arguments.model)
    found["tokenizer_made_s"] = since_start()
    found["memory_before"] = used_mib(torch)
    found["context_s"] = since_start()
    square = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    square @ square
    del square
    torch.cuda.empty_cache()
    found["memory_empty_process"] = used_mib(torch)
    found["library_s"] = since_start()

    import pagedlc_engine.cuda.build as build
    import pagedlc_engine.engine as engine

    times: dict[str, float] = {}
    timed(engine, "load_model", times)
    for name in ("FusedDecoder", "num_kv_blocks", "allocate_cache"):
        timed(build, name, times)
    for name in ("compile", "warm_up", "capture", "attach"):
        timed(build.CudaRunner, name, times)
    options = {"dtype": "bfloat16", "max_model_len": 16384, "max_num_seqs": 256, "seed": 0}
    llm = LLM(folder, load_format="dummy", gpu_memory_utilization=arguments.utilization, **options)
    found["constructed_s"] = since_start()
    llm.load()
    found["loaded_s"] = since_start()
    found["parts_s"] = times
    found["peak_allocated"] = torch.cuda.max_memory_allocated() >> 20
    llm.generate({"prompt_token_ids": list(range(100))}, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    found["first_token_s"] = since_start()
    begin = time.perf_counter()
    llm.generate({"prompt_token_ids": list(range(101))}, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    found["second_request_ms"] = round((time.perf_counter() - begin) * 1e3, 1)
    found["host"] = host_mib()
    found["memory_in_use"] = used_mib(torch)
    llm.close()
    del llm
    found["memory_closed"] = used_mib(torch)
    found["reserved_by_torch"] = torch.cuda.memory_reserved() >> 20
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    found["memory_closed_without_workspaces"] = used_mib(torch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

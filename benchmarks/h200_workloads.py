"""The workloads of an engine-neutral file on one GPU, with dummy weights.

python -m benchmarks.h200_workloads MODEL_FOLDER OUT.json --workloads FILE [--only W1,W2] [--block-size 64]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload_adapter import WorkloadAdapter, with_tokenizer
from pagedlc import LLM


def load(path: Path) -> Any:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location("workloads", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


def machine(script: Path) -> dict[str, Any]:
    """Versions and measured ceilings, from a process of its own."""
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--device-info", type=Path)
    parser.add_argument("--only", default="W1,W2,W3,W4,W5,W6")
    parser.add_argument("--w1-reps", type=int, default=3)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--suffix", default="")
    parser.add_argument("--options", default="{}", help="JSON of further engine options")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    begin = time.time()
    info = machine(arguments.device_info) if arguments.device_info else {}
    workloads = load(arguments.workloads)
    options = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 16384,
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": 256,
        "block_size": arguments.block_size,
        "seed": 0,
        **json.loads(arguments.options),
    }
    start = time.time()
    llm = LLM(with_tokenizer(arguments.model), **options).load()
    meta = {
        "engine": "pagedlc",
        "model": arguments.model.name,
        "engine_args": options,
        "device": info,
        "torch": torch.__version__,
        "engine_start_s": round(time.time() - start, 1),
        "command": " ".join(sys.argv),
    }
    print(meta, flush=True)
    config = json.loads((arguments.model / "config.json").read_text())
    suite = workloads.Suite(
        WorkloadAdapter(llm),
        meta,
        arguments.out,
        workloads.decode_weight_bytes(config),
        info.get("copy_gbps"),
        begin + arguments.seconds if arguments.seconds else None,
    )
    suite.warmup()
    suite.run(arguments.only.split(","), arguments.w1_reps, arguments.suffix)
    llm.close()
    free, total = torch.cuda.mem_get_info()
    print(f"after close {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free")
    print("total", round(time.time() - begin, 1), "s", flush=True)


if __name__ == "__main__":
    main()

"""Where a decode step's time goes: the GPU's share alone, and the step as the engine takes it.

python -m benchmarks.h200_steps MODEL_FOLDER OUT.json [--block-size 64] [--context 512]

For every batch size requests are brought to decoding; then the step's graph alone is launched again and again (events
around it: the GPU's time), and the engine steps on (wall time). Their difference is what the host adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload_adapter import with_tokenizer
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.cuda.runner import CudaRunner
from pagedlc_engine.engine import Engine, build_engine
from pagedlc_engine.model import read_spec
from pagedlc_engine.request import Request, SamplingParams

REPEATS = 60


def graph_ms(runner: CudaRunner, shape: Any) -> float:
    """The GPU's time for one step of this shape, over packets that were used before."""
    graph = runner._steps[shape].graph
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS):
            graph.launch(runner._stream)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / REPEATS)
    runner._state.set_ticket(runner._number)
    runner._packer.forget()
    return statistics.median(times)


def measure(engine: Engine, batch: int, context: int, temperature: float) -> dict[str, Any]:
    """One batch size."""
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    params = SamplingParams(temperature=temperature, max_tokens=400, ignore_eos=True)
    for number in range(batch):
        prompt = [(number * 7919 + place * 31) % 10000 for place in range(context)]
        engine.add(Request(f"{batch}/{number}", prompt, params, whole=True))
    shapes: list[Any] = []
    pack = runner._packer.pack

    def noting(plan: Any, packet: Any) -> Any:
        packed = pack(plan, packet)
        shapes.append(packed.shape)
        return packed

    runner._packer.pack = noting  # type: ignore[method-assign]
    while not shapes or not shapes[-1].decodes:
        engine.step()
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    alone = graph_ms(runner, shapes[-1])
    for _ in range(3):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        engine.step()
    wall = (time.perf_counter() - start) / 200 * 1e3
    runner._packer.pack = pack  # type: ignore[method-assign]
    for number in range(batch):
        engine.abort(f"{batch}/{number}")
    while engine.has_work():
        engine.step()
    engine.reset_prefix_cache()
    return {"batch": batch, "temperature": temperature, "gpu_ms": round(alone, 4), "step_ms": round(wall, 4)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    arguments = parser.parse_args()
    folder = with_tokenizer(arguments.model)
    config = EngineConfig.create(
        model=folder,
        load_format="dummy",
        max_model_len=16384,
        max_num_seqs=256,
        block_size=arguments.block_size,
        seed=0,
    )
    start = time.time()
    engine = build_engine(config, read_spec(folder, "dummy"))
    print("start", round(time.time() - start, 1), flush=True)
    rows = []
    for batch in map(int, arguments.batches.split(",")):
        for temperature in (0.0, 0.6) if batch in (1, 64, 256) else (0.0,):
            rows.append(measure(engine, batch, arguments.context, temperature))
            print(rows[-1], flush=True)
    report = {"model": arguments.model.name, "torch": torch.__version__, "context": arguments.context, "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What each sampling setting costs a decode step, beside greedy.

python -m benchmarks.h200_sampling MODEL_FOLDER OUT.json [--batches 1,64] [--steps 100]

Every request of a batch has the same setting; a step is timed as the engine takes it (wall time). The weights are
random, so logits are nearly equal and a nucleus is most of the vocabulary: the slowest case of top_p.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload_adapter import with_tokenizer
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.engine import Engine, build_engine
from pagedlc_engine.grammar import TokenVocabulary
from pagedlc_engine.grammar.spec import StructuredOutputsParams
from pagedlc_engine.model import read_spec
from pagedlc_engine.request import Request, SamplingParams

DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 7}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": DRAWN,
    "Qwen3's default": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "seed": 7},
    "top_p 0.9": {**DRAWN, "top_p": 0.9},
    "top_k 50": {**DRAWN, "top_k": 50},
    "min_p 0.05": {**DRAWN, "min_p": 0.05},
    "top_p and top_k": {**DRAWN, "top_p": 0.9, "top_k": 50},
    "repetition_penalty 1.1": {**DRAWN, "repetition_penalty": 1.1},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "a grammar": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="t[t0-9]*")},
}


def step_ms(engine: Engine, batch: int, steps: int, setting: dict[str, Any]) -> float:
    """Milliseconds a step, once all requests of the batch decode."""
    params = SamplingParams(max_tokens=steps + 60, ignore_eos=True, **setting)
    for number in range(batch):
        prompt = [(number * 7919 + place * 31) % 10000 for place in range(384)]
        engine.add(Request(f"{batch}/{number}", prompt, params))
    seen: set[str] = set()
    while len(seen) < batch:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            seen.add(delta.request_id)
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    taken = (time.perf_counter() - begin) / steps * 1e3
    for number in range(batch):
        engine.abort(f"{batch}/{number}")
    while engine.has_work():
        engine.step()
    engine.reset_prefix_cache()
    return round(taken, 3)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    folder = with_tokenizer(arguments.model)
    options = {"max_model_len": 4096, "max_num_seqs": 64, "seed": 0, "gpu_memory_utilization": 0.3}
    config = EngineConfig.create(model=folder, load_format="dummy", **options)
    spec = read_spec(folder, "dummy")
    words = tuple(f"t{number}".encode() for number in range(spec.vocab_size))
    vocabulary = TokenVocabulary(words, frozenset(), (0,), lambda text: [])
    engine = build_engine(config, spec, vocabulary=lambda: vocabulary)
    rows: dict[str, dict[str, float]] = {}
    for batch in arguments.batches.split(","):
        for name, setting in SETTINGS.items():
            rows.setdefault(name, {})[batch] = step_ms(engine, int(batch), arguments.steps, setting)
            print(batch, name, rows[name][batch], flush=True)
    report = {"model": arguments.model.name, "torch": torch.__version__, "step_ms": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""From logits to tokens with and without min_p, top_k and top_p: ``python -m benchmarks.kernels_sampling --out DIR``.

151,936 tokens, float32. ``peaked`` logits fall off with the logarithm of a token's rank, as a model's do; ``flat`` ones
are nearly equal, so that a nucleus is most of the vocabulary. Every case is compared with the reference first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.kernels_timing import microseconds
from pagedlc_engine.kernels.sampling import sample_tokens, sample_tokens_reference

VOCABULARY = 151936
#: Temperature, then top_k, top_p and min_p; ``None``: the kernels are not told of filters.
SETTINGS: dict[str, tuple[float, tuple[float, float, float] | None]] = {
    "greedy": (0.0, None),
    "greedy, filters possible": (0.0, (0, 1, 0)),
    "temperature 0.6": (0.6, None),
    "temperature 0.6, filters possible": (0.6, (0, 1, 0)),
    "0.6, top_k 20, top_p 0.95": (0.6, (20, 0.95, 0)),
    "0.6, top_p 0.9": (0.6, (0, 0.9, 0)),
    "1.0, top_k 50": (1.0, (50, 1, 0)),
    "1.0, top_p 0.95": (1.0, (0, 0.95, 0)),
    "1.0, min_p 0.05": (1.0, (0, 1, 0.05)),
}


def peaked(rows: int) -> torch.Tensor:
    ranks = torch.rand(rows, VOCABULARY, device="cuda").argsort(-1)
    return 20.0 - 1.5 * (ranks + 1).log()


def flat(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, device="cuda") * 0.1


def measure(kind: Callable[[int], torch.Tensor], rows: int) -> dict[str, dict[str, float]]:
    """Microseconds, and the share of rows with another token than the reference, of each setting."""
    copies = max(2, min(16, 200_000_000 // (rows * VOCABULARY * 4)))
    logits = [kind(rows) for _ in range(copies)]
    seeds, counters = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") + 1
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    found = {}
    for name, (temperature, chosen) in SETTINGS.items():
        temperatures = torch.full((rows,), temperature, device="cuda")
        filters = None if chosen is None else torch.tensor([chosen] * rows, dtype=torch.float32, device="cuda")
        options = temperatures, seeds, counters, filters
        wrong = (sample_tokens(logits[0], *options) != sample_tokens_reference(logits[0], *options)).float().mean()
        calls = [lambda each=each, options=options: sample_tokens(each, *options, out=out) for each in logits]
        time = round(microseconds(calls, window_ms=2.0), 2)
        found[name] = {"us": time, "differing": round(float(wrong), 3)}
        print(f"{kind.__name__:7} {rows:4} {name:36} {time:8} us   differing {float(wrong):.3f}", flush=True)
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="1,8,64,256")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = {
        f"{kind.__name__} {rows}": measure(kind, int(rows))
        for rows in arguments.rows.split(",")
        for kind in (peaked, flat)
    }
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report = json.dumps({"versions": versions, "results": results}, indent=1) + "\n"
    (arguments.out / "kernels_sampling.json").write_text(report)


if __name__ == "__main__":
    main()

"""What 8-bit products cost in quality and save in time, on SmolLM2-135M-Instruct.

    python benchmarks/int8_error.py [--tokens 2048] [--threads 2]

Quality: perplexity, divergence from float32 (KL, mean and 99th percentile, in nats) and how often the likeliest
token stays the same, over the descriptions of some installed packages. Time: microseconds of CPU time, all threads,
per product of one layer, weights not in cache; ``linear_dynamic`` is torch's own, with one scale for all tokens of
the batch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from pagedlc import LLM
from pagedlc_engine.attention.base import AttentionBatch
from pagedlc_engine.model import Decoder, ModelSpec, int8, load_model
from pagedlc_engine.model.decoder import StepModel
from pagedlc_engine.model.linear import PlainLinear, PlainMethod, PlainNormLinear, PlainResidualLinear
from pagedlc_engine.model.loaders.gguf import GGUFWeights
from pagedlc_engine.model.weights import build_decoder
from pagedlc_engine.native import NativeAttention, NativeDecoder, NativeStep, load_library

CPU = torch.device("cpu")
PACKAGES = ("numpy", "torch", "transformers", "pydantic", "rich", "tqdm", "safetensors", "huggingface_hub", "jinja2")
LENGTH = 256
ROWS = (1, 8, 64, 256, 512)


class DynamicMethod(PlainMethod):
    """``torch.ops.quantized.linear_dynamic`` in place of every product."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return _dynamic(weight)

    def norm_linear(self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        product = _dynamic(weight)
        return lambda stream: product(functional.rms_norm(stream, gain.shape, gain, eps))

    def residual_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, spiky: bool) -> Any:
        product = _dynamic(weight)
        return lambda x, stream: product(x) + stream


def _dynamic(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = int8.pack(weight, weight.abs().amax(dim=1) / 127)
    return lambda x: torch.ops.quantized.linear_dynamic(x.contiguous(), packed)


def dense_attention(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention over one sequence without a cache."""
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    result = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return result[0].transpose(0, 1).flatten(1)


def texts(llm: LLM, count: int) -> list[torch.Tensor]:
    """Sequences of :data:`LENGTH` tokens, ``count`` in all.

    Each begins with the token that every prompt of the model begins with. Without it the model looks for another
    token to rest its attention on, and which one it takes hangs on the last digit of any precision.
    """
    found = []
    for name in itertools.islice(PACKAGES, max(1, count // LENGTH)):
        _, _, text = (importlib.metadata.distribution(name).read_text("METADATA") or "").partition("\n\n")
        first = [] if llm.spec.bos_token_id is None else [llm.spec.bos_token_id]
        found.append(torch.tensor([*first, *llm.tokenizer.encode(text)][:LENGTH]))
    return found


def log_probabilities(decoder: StepModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    """``[all tokens but each sequence's last, vocab]``."""
    rows = []
    for ids in sequences:
        attention = native_attention(decoder.spec, len(ids)) if isinstance(decoder, NativeDecoder) else dense_attention
        hidden = decoder.forward(ids, torch.arange(len(ids)), attention)
        rows.append(decoder.compute_logits(hidden[:-1]).log_softmax(-1))
    return torch.cat(rows)


def native_attention(spec: ModelSpec, length: int) -> NativeStep:
    """One sequence over a cache of its own."""
    blocks = -(-length // 16)
    backend = NativeAttention(spec, 16, blocks, torch.float32, CPU)
    one = np.array([length], dtype=np.int32)
    return backend.plan(AttentionBatch(one, one, np.arange(blocks, dtype=np.int32)[None], np.arange(length)))


@contextmanager
def seven_bits() -> Iterator[None]:
    """As on a CPU without VNNI."""
    with patch.object(int8, "activation_levels", lambda: 63):
        yield


def quality(llm: LLM, sequences: list[torch.Tensor]) -> None:
    """Print the table of errors."""
    path, spec = llm.config.model, llm.spec

    def loaded(quantization: str | None) -> Decoder:
        return load_model(path, spec, "auto", torch.float32, CPU, quantization, 0)

    def unrotated(method: Any) -> Decoder:
        return build_decoder(GGUFWeights(path, spec), spec, method, torch.float32, CPU)

    def seven() -> Decoder:
        with seven_bits():
            return loaded("int8")

    def native() -> NativeDecoder:
        library = load_library()
        assert library is not None, "no C++ compiler"
        return NativeDecoder(spec, GGUFWeights(path, spec), library, torch.get_num_threads(), LENGTH)

    variants: dict[str, Callable[[], StepModel]] = {
        "float32": lambda: loaded(None),
        "fp16 weights": lambda: loaded("fp16"),
        "int8, native": native,
        "int8": lambda: loaded("int8"),
        "int8, 7-bit activations (no VNNI)": seven,
        "int8, hidden space not rotated": lambda: unrotated(int8.Int8Method()),
        "linear_dynamic everywhere": lambda: unrotated(DynamicMethod()),
    }
    targets = torch.cat([ids[1:] for ids in sequences])
    print(f"{len(targets)} tokens\n\n| | perplexity | KL mean | KL p99 | same likeliest |\n|---|---|---|---|---|")
    exact: torch.Tensor | None = None
    for name, make in variants.items():
        found = log_probabilities(make(), sequences)
        exact = found if exact is None else exact
        divergence = (exact.exp() * (exact - found)).sum(-1)
        perplexity = (-found.gather(1, targets[:, None]).mean()).exp()
        same = (exact.argmax(-1) == found.argmax(-1)).float().mean()
        print(
            f"| {name} | {perplexity:.3f} | {divergence.mean():.4f} | {divergence.quantile(0.99):.3f} | {same:.1%} |",
            flush=True,
        )


def microseconds(run: Callable[[int], Any], copies: int) -> float:
    """Least CPU time of one call, going round ``copies`` weights."""
    run(0)
    best = float("inf")
    for _ in range(7):
        begin = time.process_time()
        for index in range(copies):
            run(index)
        best = min(best, (time.process_time() - begin) / copies)
    return best * 1e6


def _call(layers: list[Any], arguments: tuple[torch.Tensor, ...], index: int) -> Any:
    return layers[index](*arguments)


def speed(spec: ModelSpec) -> None:
    """Print the table of times."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shapes = {"qkv": (qkv, hidden), "output": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    print(f"\n| | rows | {' | '.join(('float32', 'int8', 'linear_dynamic'))} |\n|---|---|---|---|---|")
    for (name, shape), rows in itertools.product(shapes.items(), ROWS):
        weights = [torch.randn(shape) * 0.05 for _ in range(10)]
        x, stream, gain = torch.randn(rows, shape[1]), torch.randn(rows, shape[0]), torch.ones(shape[1])
        dynamic = [_dynamic(weight) for weight in weights]
        plain: list[Any]
        rounded: list[Any]
        if name in ("qkv", "gate_up"):
            plain = [PlainNormLinear(gain, 1e-5, weight, None) for weight in weights]
            rounded = [int8.Int8NormLinear(gain, 1e-5, weight, None) for weight in weights]
            arguments: tuple[torch.Tensor, ...] = (x,)
        else:
            plain = [PlainResidualLinear(weight, None) for weight in weights]
            rounded = [int8.Int8ResidualLinear(weight, None, name == "down") for weight in weights]
            arguments = (x, stream)
        times = [microseconds(partial(_call, *case), 10) for case in ((plain, arguments), (rounded, arguments))]
        times.append(microseconds(partial(_call, dynamic, (x,)), 10))
        print(f"| {name} | {rows} | " + " | ".join(f"{value:.0f}" for value in times) + " |", flush=True)
    head = torch.randn(spec.vocab_size, hidden) * 0.05
    pairs = PlainLinear(head, None), int8.Int8Linear(head, None), _dynamic(head)
    for rows in (1, 8):
        x = torch.randn(rows, hidden)
        times = [microseconds(partial(_call, [layer], (x,)), 1) for layer in pairs]
        print(f"| head | {rows} | " + " | ".join(f"{value:.0f}" for value in times) + " |", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    with torch.inference_mode(), LLM("smollm2") as llm:
        quality(llm, texts(llm, options.tokens))
        speed(llm.spec)


if __name__ == "__main__":
    main()

"""Engines over the GPU path and over the plain one, with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pagedlc_engine.attention.torch_backend import TorchAttention
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.cuda.build import build_cuda_runner
from pagedlc_engine.cuda.memory import MemoryBudget
from pagedlc_engine.device import Placement, max_num_seqs
from pagedlc_engine.engine import Engine
from pagedlc_engine.kv.block_pool import BlockPool
from pagedlc_engine.kv.manager import KVCacheManager
from pagedlc_engine.model import load_model, read_spec
from pagedlc_engine.request import Request, SamplingParams, TokenDelta
from pagedlc_engine.runner import ModelRunner
from pagedlc_engine.sampling import Sampler
from pagedlc_engine.scheduler import Scheduler
from tests.engine.tiny_models import make_tiny_model

NUM_BLOCKS = 300


def make_engine(
    folder: Path,
    device: torch.device,
    *,
    plain: bool = False,
    run_ahead: int = 1,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Engine:
    """An engine over a tiny random model; ``plain`` is the reference: torch attention, no graphs, no run-ahead."""
    model = {key: options.pop(key) for key in list(options) if key in _MODEL_OPTIONS}
    path = make_tiny_model(folder / "tiny", **{"num_hidden_layers": 1, **model})
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": NUM_BLOCKS, "block_size": 16, "seed": 1}
    settings |= options
    config = EngineConfig.create(model=path, load_format="dummy", **settings)
    spec = read_spec(path, "dummy")
    size = config.block_size or 16
    placement = Placement(device, dtype, None, TorchAttention, config.max_num_batched_tokens or 64, size)
    budget = MemoryBudget.of(device, 0.5) if device.type == "cuda" else None
    decoder = load_model(path, spec, "dummy", dtype, device, None, 1)
    max_model_len = spec.max_position_embeddings
    if plain:
        cache = KVCacheManager(BlockPool(config.num_blocks or NUM_BLOCKS), size, config.enable_prefix_caching)
        backend = TorchAttention(spec, size, config.num_blocks or NUM_BLOCKS, dtype, device)
        runner = ModelRunner(decoder, backend, Sampler(spec.vocab_size, device), cache)
    else:
        runner, cache = build_cuda_runner(config, placement, decoder, max_model_len, budget)
    scheduler = Scheduler(cache, max_num_seqs(config, device), placement.max_num_batched_tokens, max_model_len)
    return Engine(scheduler, runner, seed=1, run_ahead=0 if plain else run_ahead)


_MODEL_OPTIONS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "architectures",
    "model_type",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


def answers(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    *,
    keep: list[TokenDelta] | None = None,
    fails: bool = False,
) -> dict[str, list[int]]:
    """All requests at once, to the end: tokens by request id and answer. ``keep`` collects the deltas."""
    for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(request_id=f"r{number}", prompt_token_ids=prompt, params=param))
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            assert (delta.error is not None) == fails, delta.error
            if delta.token_ids:
                tokens.setdefault(f"{delta.request_id}/{delta.index}", []).extend(delta.token_ids)
            if keep is not None:
                keep.append(delta)
    return tokens

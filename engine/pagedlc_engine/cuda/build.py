"""Puts a GPU engine's runner together: weights taken over, memory measured, cache allocated, steps captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pagedlc_engine.attention.base import kv_bytes_per_block
from pagedlc_engine.attention.triton_backend import allocate_cache, attention_geometry
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.cuda.fused_decoder import FusedDecoder
from pagedlc_engine.cuda.memory import MemoryBudget
from pagedlc_engine.cuda.runner import CudaRunner
from pagedlc_engine.device import Placement, max_num_seqs, num_kv_blocks
from pagedlc_engine.errors import OutOfMemoryError
from pagedlc_engine.kernels.logprobs import measure_tokens
from pagedlc_engine.kernels.sampler_stages import forbid_tokens, penalise_tokens, record_tokens
from pagedlc_engine.kernels.sampling import sample_tokens
from pagedlc_engine.kv.block_pool import BlockPool
from pagedlc_engine.kv.manager import KVCacheManager
from pagedlc_engine.model.decoder import Decoder
from pagedlc_engine.sampling import Sampler, SamplerKernels

if TYPE_CHECKING:
    from pagedlc_engine.model import ModelSpec

__all__ = ["build_cuda_runner"]

logger = logging.getLogger(__name__)


def build_cuda_runner(
    config: EngineConfig,
    placement: Placement,
    decoder: Decoder,
    max_model_len: int,
    budget: MemoryBudget | None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CudaRunner, KVCacheManager]:
    """A runner that has its cache and its graphs.

    Args:
        config: The engine's options.
        placement: Where and how to compute.
        decoder: The model; its weights go over to the runner.
        max_model_len: Longest sequence in tokens.
        budget: Taken before the weights were loaded; ``None`` only with Triton's interpreter.
        progress: Called with (done, total) while steps are captured.

    Raises:
        OutOfMemoryError: Weights, activations or cache do not fit.
        ConfigError: The cache would be too small for a request that was asked for.
    """
    spec, device = decoder.spec, placement.device
    fused = FusedDecoder(decoder, max_model_len)
    runner = CudaRunner(
        fused,
        attention_geometry(spec, placement.block_size, device),
        Sampler(
            spec.vocab_size,
            device,
            SamplerKernels(sample_tokens, forbid_tokens, penalise_tokens, record_tokens, measure_tokens),
        ),
        max_num_seqs(config, device),
        placement.max_num_batched_tokens,
        max_model_len,
        use_graphs=device.type == "cuda" and not config.enforce_eager,
        capture_sizes=config.cudagraph_capture_sizes,
    )
    available = None if budget is None else budget.left(_activations(runner, placement, spec, placement.block_size))
    num_blocks = num_kv_blocks(config, placement, spec, max_model_len, available)
    # First the tensor: a number of blocks that no card can hold would fill the host's memory with bookkeeping.
    kv = allocate_cache(spec, placement.block_size, num_blocks, placement.dtype, device)
    cache = KVCacheManager(BlockPool(num_blocks), placement.block_size, config.enable_prefix_caching)
    runner.attach(kv, cache)
    start, before = time.monotonic(), 0 if budget is None else budget.used
    graphs = runner.capture(progress)
    if budget is not None:
        tokens = (num_blocks - 1) * placement.block_size
        logger.info(
            "KV cache: %d blocks of %d tokens (%.1f GiB), room for %.1f requests of %d tokens at once; "
            "%d CUDA graphs captured in %.1f s, %.2f GiB; %.1f of %.1f GiB in use.",
            num_blocks,
            placement.block_size,
            num_blocks * kv_bytes_per_block(spec, placement.block_size, placement.dtype) / 2**30,
            tokens / max_model_len,
            max_model_len,
            graphs,
            time.monotonic() - start,
            (budget.used - before) / 2**30,
            budget.used / 2**30,
            budget.limit / 2**30,
        )
    return runner, cache


def _activations(runner: CudaRunner, placement: Placement, spec: ModelSpec, block_size: int) -> int:
    """Bytes that the largest step needs beside weights and cache, measured on a cache of one block."""
    try:
        cache = KVCacheManager(BlockPool(2), block_size, enable_prefix_caching=False)
        runner.attach(allocate_cache(spec, block_size, 2, placement.dtype, placement.device), cache)
        start = time.monotonic()
        if kernels := runner.compile():
            logger.info("%d GPU kernels ready in %.1f s.", kernels, time.monotonic() - start)
        before = torch.cuda.memory_allocated(placement.device)
        torch.cuda.reset_peak_memory_stats(placement.device)
        runner.warm_up()
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"A step of {placement.max_num_batched_tokens} tokens does not fit beside the weights on "
            f"{placement.device}; lower max_num_batched_tokens or max_num_seqs, or use a smaller model."
        ) from error
    peak = torch.cuda.max_memory_allocated(placement.device)
    torch.cuda.empty_cache()
    return int(peak - before)

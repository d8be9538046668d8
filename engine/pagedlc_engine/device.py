"""The one place that decides where and in what precision an engine computes."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedlc_engine.attention.base import AttentionBackend, kv_bytes_per_block
from pagedlc_engine.attention.torch_backend import TorchAttention
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.errors import ConfigError, OutOfMemoryError
from pagedlc_engine.model import ModelSpec, half_available, int8_available
from pagedlc_engine.native import Library, NativeAttention, load_library, unsupported

__all__ = [
    "Placement",
    "check_hardware",
    "kv_block_size",
    "max_num_seqs",
    "num_kv_blocks",
    "on_device",
    "place",
    "settled",
    "with_current_gpu",
]

logger = logging.getLogger(__name__)

GIB = 1 << 30
#: Without a setting, a CPU engine takes this share of the free memory for its KV cache, and no more than this.
CPU_CACHE_SHARE = 0.25
CPU_CACHE_LIMIT = 2 * GIB
CPU_STEP_TOKENS = 512
CPU_MAX_NUM_SEQS = 64
GPU_MAX_NUM_SEQS = 256
#: Products of a step that streams wait for: some 25 to 30 ms of an H200's matrix units; and its most tokens, because
#: attention over a long context comes on top.
GPU_STREAMING_FLOPS = 2e13
GPU_STREAMING_TOKENS = 2048
#: A step that nobody waits for token by token, on a card with room for its activations and on others.
GPU_LONG_STEP_TOKENS = 8192
GPU_STEP_TOKENS = 2048
GPU_LONG_STEP_MEMORY = 70 * GIB
#: Steps in flight are described in sixteen packets, less the one being written and the one that a capture takes.
GPU_MOST_AHEAD = 14
#: Tokens per KV block. A GPU's bulk copy fetches a block of 64 as one tile: prompts are 9% faster than with 16,
#: decoding 1%. A CPU gains nothing by larger blocks, and smaller ones find a few more cached tokens.
CPU_BLOCK_SIZE = 16
GPU_BLOCK_SIZE = 64
#: Options that a CPU has no use for.
GPU_ONLY = ("cudagraph_capture_sizes", "enforce_eager", "gpu_memory_utilization")
#: Left free on a GPU for activations and the libraries' workspaces.
GPU_RESERVE = 2 * GIB


@dataclass(frozen=True)
class Placement:
    """Where an engine computes: all options that were ``"auto"``, decided.

    Args:
        native: The compiled step of a CPU, where it is taken.
        fused: Whether a GPU runs the fused decoder in CUDA graphs.
    """

    device: torch.device
    dtype: torch.dtype
    quantization: str | None
    attention: type[AttentionBackend]
    max_num_batched_tokens: int
    block_size: int = CPU_BLOCK_SIZE
    fused: bool = False
    max_num_batched_tokens_while_streaming: int | None = None
    native: Library | None = None

    @property
    def run_ahead(self) -> int:
        """Steps launched before the oldest one's tokens are looked at: a GPU must not wait for the host."""
        return 1 if self.fused else 0

    @property
    def most_ahead(self) -> int:
        """The same while other threads keep the host's from launching in time."""
        return GPU_MOST_AHEAD if self.fused else 0


def place(config: EngineConfig, spec: ModelSpec) -> Placement:
    """Decide device, types, attention backend and step size.

    Raises:
        ConfigError: The options ask for hardware that is not there, or for things that do not go together.
    """
    device = _device(config)
    dtype = _dtype(config, device)
    native = _native(config, spec, device, dtype)
    quantization = "int8" if native else _quantization(config, device, dtype)
    attention = NativeAttention if native else _attention(config, device)
    while_streaming = config.max_num_batched_tokens_while_streaming or _streaming_budget(spec, device)
    fused = device.type == "cuda" and attention is not TorchAttention
    return Placement(
        device=device,
        dtype=dtype,
        quantization=quantization,
        attention=attention,
        max_num_batched_tokens=config.max_num_batched_tokens or _token_budget(device, while_streaming),
        block_size=_block_size(config, fused),
        fused=fused,
        max_num_batched_tokens_while_streaming=while_streaming,
        native=native,
    )


def kv_block_size(config: EngineConfig) -> int:
    """Tokens per KV block; known without looking at a model, or at what the machine can compile."""
    return _block_size(config, _likely_device(config).type == "cuda" and config.attention_backend != "torch")


def _block_size(config: EngineConfig, fused: bool) -> int:
    return config.block_size or (GPU_BLOCK_SIZE if fused else CPU_BLOCK_SIZE)


def _likely_device(config: EngineConfig) -> torch.device:
    """A GPU, without its number, or the CPU: where it will be unless the driver fails."""
    # Unlike is_available(), device_count() leaves the driver alone, so that this process can still be forked.
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.device_count() > 0)
    return torch.device("cuda" if on_gpu else "cpu")


def check_hardware(config: EngineConfig) -> None:
    """Refuse what this machine cannot do; only what can be said at once, without a CUDA context.

    Raises:
        ConfigError: The options ask for hardware that is not there, or for things that do not go together.
    """
    if config.device.startswith("cuda"):
        _check_number(config.device, torch.cuda.device_count())
    device = _likely_device(config)
    _check_attention(config, device)
    dtype = _dtype(config, device)
    if config.device != "auto" and (device.type == "cuda" or dtype != torch.float32):
        _quantization(config, device, dtype)


def settled(config: EngineConfig) -> EngineConfig:
    """The options with defaults filled in, and what changes nothing left out: equal where engines are alike.

    Only what can be said at once: nothing is compiled, no CUDA context is made, and the model is not looked at.
    """
    device = _likely_device(config)
    own = _settled_on_gpu(config) if device.type == "cuda" else _settled_on_cpu(config)
    return config.model_copy(
        update={
            "dtype": str(_dtype(config, device)).removeprefix("torch."),
            "block_size": kv_block_size(config),
            "max_num_seqs": max_num_seqs(config, device),
            **own,
        }
    )


def _settled_on_gpu(config: EngineConfig) -> dict[str, object]:
    only = config.device == "cuda:0" and torch.cuda.device_count() == 1
    return {
        "device": "cuda" if only or config.device == "auto" else config.device,
        "attention_backend": "torch" if config.attention_backend == "torch" else "triton",
        "quantization": None if config.quantization == "auto" else config.quantization,
    }


def _settled_on_cpu(config: EngineConfig) -> dict[str, object]:
    return {
        "device": "cpu",
        "max_num_batched_tokens": config.max_num_batched_tokens or CPU_STEP_TOKENS,
        **{name: EngineConfig.model_fields[name].default for name in GPU_ONLY},
    }


def _native(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Library | None:
    """The compiled step, if the options leave room for it, the model fits and this machine can build it."""
    if device.type != "cpu" or dtype != torch.float32 or config.attention_backend != "auto":
        return None
    if config.quantization not in ("auto", "int8"):
        return None
    reason = unsupported(spec)
    library = load_library() if reason is None else None
    if library is not None and config.quantization == "auto" and not library.is_fast:
        reason = "this CPU has no fast products of 8-bit integers (AVX2 or AVX-512)"
    if reason is not None:
        logger.info("The native CPU step is off, torch computes instead: %s.", reason)
        return None
    return library


def _token_budget(device: torch.device, while_streaming: int | None) -> int:
    """Tokens of a step that no stream waits for."""
    if device.type != "cuda":
        return CPU_STEP_TOKENS
    roomy = torch.cuda.get_device_properties(device).total_memory >= GPU_LONG_STEP_MEMORY
    return max(while_streaming or 0, GPU_LONG_STEP_TOKENS if roomy else GPU_STEP_TOKENS)


def _streaming_budget(spec: ModelSpec, device: torch.device) -> int | None:
    """Tokens of a step that keep streams, whose next tokens wait for it, flowing; ``None`` for no difference."""
    if device.type != "cuda":
        return None
    width = 2 * (spec.num_heads + spec.num_kv_heads)
    weights = spec.num_layers * spec.hidden_size * (spec.head_dim * width + 3 * spec.intermediate_size)
    wanted = int(GPU_STREAMING_FLOPS / (2 * weights))
    return max(1024, min(GPU_STREAMING_TOKENS, 1 << (wanted.bit_length() - 1)))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU torch's current one in this thread: streams, graphs and kernels without a device belong to that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def with_current_gpu(config: EngineConfig) -> EngineConfig:
    """For another process: there torch's current GPU would be the first one, whatever it is here."""
    chosen = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if config.device not in ("auto", "cuda") or not chosen:
        return config
    return config.model_copy(update={"device": f"cuda:{torch.cuda.current_device()}"})


def _device(config: EngineConfig) -> torch.device:
    """Where to compute; a GPU with its number, since another thread's current one may be another.

    Raises:
        ConfigError: A GPU was asked for that is not there.
    """
    wanted = config.device
    gpus = 0 if wanted == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    if wanted != "auto":
        _check_number(wanted, gpus)
    if wanted in ("auto", "cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(wanted)


def _check_number(wanted: str, gpus: int) -> None:
    if not gpus:
        raise ConfigError(
            f"device={wanted!r} was asked for, but torch sees no CUDA device; use device='cpu' or 'auto'."
        )
    if (torch.device(wanted).index or 0) >= gpus:
        names = ", ".join(f"'cuda:{index}'" for index in range(gpus))
        raise ConfigError(f"device={wanted!r} was asked for, but torch sees only {names}.")


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def _quantization(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    fits = device.type == "cpu" and dtype == torch.float32
    possible = {"fp16": fits and half_available(), "int8": fits and int8_available()}
    if config.quantization == "auto":
        # Not torch's int8: its rounding makes an answer depend on the batch and on what was cached.
        return "fp16" if possible["fp16"] else None
    if config.quantization is not None and not possible[config.quantization]:
        raise ConfigError(
            f"quantization={config.quantization!r} needs a CPU with torch's FBGEMM kernels and dtype float32; "
            "use quantization='none' here."
        )
    return config.quantization


def _check_attention(config: EngineConfig, device: torch.device) -> None:
    if config.attention_backend == "triton" and device.type != "cuda":
        raise ConfigError("attention_backend='triton' needs a CUDA device; use 'torch' or 'auto'.")


def _attention(config: EngineConfig, device: torch.device) -> type[AttentionBackend]:
    _check_attention(config, device)
    if config.attention_backend == "torch" or device.type != "cuda":
        return TorchAttention
    from pagedlc_engine.attention.triton_backend import TritonAttention

    return TritonAttention


def max_num_seqs(config: EngineConfig, device: torch.device) -> int:
    """Requests that may run at once: what was asked for, or what the device is good for."""
    return config.max_num_seqs or (GPU_MAX_NUM_SEQS if device.type == "cuda" else CPU_MAX_NUM_SEQS)


def num_kv_blocks(
    config: EngineConfig, placement: Placement, spec: ModelSpec, max_model_len: int, available: int | None = None
) -> int:
    """KV blocks to allocate, the reserved one included; where no option says how many, for when weights are loaded.

    Args:
        config: The engine's options.
        placement: Where it computes.
        spec: The model.
        max_model_len: Longest sequence in tokens.
        available: Bytes there are for the cache, where that was measured.

    Raises:
        OutOfMemoryError: There is no memory for even two blocks.
        ConfigError: The cache would be too small for one request of ``max_model_len`` that was asked for.
    """
    per_block = kv_bytes_per_block(spec, placement.block_size, placement.dtype)
    enough = max_num_seqs(config, placement.device) * -(-max_model_len // placement.block_size) + 1
    if config.num_blocks is not None:
        blocks = config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        blocks = config.kv_cache_memory_bytes // per_block
    else:
        free = _free_bytes(config, placement.device) if available is None else available
        blocks = min(free // per_block, enough)
    if blocks < 2:
        raise OutOfMemoryError(
            f"No room for a KV cache: it has at least two blocks, of {per_block:,} bytes each. "
            f"Raise {_decides_room(config, placement.device)}, or use a smaller model."
        )
    capacity = (blocks - 1) * placement.block_size
    if config.max_model_len is not None and capacity < max_model_len:
        raise ConfigError(
            f"max_model_len is {max_model_len} tokens, but the KV cache holds only {capacity}. Lower max_model_len, "
            f"or raise {_decides_room(config, placement.device)}."
        )
    return blocks


def _decides_room(config: EngineConfig, device: torch.device) -> str:
    """The options that would make the KV cache larger."""
    if config.num_blocks is not None:
        return "num_blocks"
    if config.kv_cache_memory_bytes is not None or device.type == "cpu":
        return "kv_cache_memory_bytes"
    return "kv_cache_memory_bytes or gpu_memory_utilization"


def _free_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(config.gpu_memory_utilization * total) - (total - free) - GPU_RESERVE
    return min(int(_available_memory() * CPU_CACHE_SHARE), CPU_CACHE_LIMIT)


def _available_memory() -> int:
    """Bytes the system can still give out (Linux: ``MemAvailable``; elsewhere half of all memory)."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

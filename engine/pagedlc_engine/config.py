"""The engine's options, validated once and frozen.

Names are vLLM's where vLLM has the option, and the same in Python and on the command line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pagedlc_engine.errors import ConfigError

__all__ = ["EngineConfig", "check_option_names", "validation_message"]

DType = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "gguf", "safetensors", "dummy"]
AttentionBackendName = Literal["auto", "torch", "triton"]
EngineHostName = Literal["thread", "process"]
#: So many names can be read in an error; more are looked up.
FEW_NAMES = 12
#: The engine's tables hold numbers of 32 bits.
MOST = 2**31 - 1


class EngineConfig(BaseModel):
    """Options of one engine.

    Args:
        model: Folder with ``config.json`` (and safetensors), or a ``.gguf`` file. Already resolved: the
            engine does not know about model names or hubs.
        load_format: ``"auto"`` looks at the files; ``"dummy"`` makes random weights from the config alone.
        device: ``"cpu"``, ``"cuda"`` (torch's current GPU) or the number of one, such as ``"cuda:1"``. ``"auto"`` is
            ``"cuda"`` when there is one, and ``"cpu"`` otherwise.
        dtype: Type of weights and activations. ``"auto"`` is float32 on a CPU and bfloat16 on a GPU.
        quantization: ``"none"`` computes in ``dtype``. In Python ``None`` is the same. On a CPU, ``"int8"`` multiplies
            in 8-bit integers, and ``"fp16"`` keeps the weights in half precision and computes in float32. ``"auto"``
            takes int8 where the engine can compile its own CPU step (it finds a C++ compiler, and the model fits):
            there the same request gives the same answer whatever else is in the batch or the cache. Elsewhere it takes
            fp16 where the CPU has the kernels for it, and nothing otherwise.
        block_size: Tokens per KV-cache block, a power of two from 16 to 64. Prompts share whole blocks only, so
            smaller ones share a little more. ``None`` takes 16 on a CPU and 64 on a GPU, where long prompts are some
            9% faster so.
        num_blocks: KV blocks to allocate, one of which holds nothing. ``None`` sizes the cache from the memory options.
        kv_cache_memory_bytes: Bytes for the KV cache. ``None``: on a CPU a share of the free memory, on a
            GPU what ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: Fraction of the whole card this engine may bring into use.
        max_model_len: Longest prompt plus answer in tokens, at least one of each. ``None`` takes the model's own limit.
        max_num_seqs: Most requests running at once; can be changed while the engine runs. ``None`` takes 64 on a
            CPU and 256 on a GPU.
        max_num_batched_tokens: Token budget of one step; longer prompts are computed in chunks.
            ``None`` takes 512 on a CPU and 8,192 on a GPU with 70 GiB or more, where fewer and longer steps are
            quicker; on a smaller GPU 2,048.
        max_num_batched_tokens_while_streaming: The same while an answer is being streamed, so that its tokens keep
            coming while a long prompt is computed. ``None`` makes no difference on a CPU and takes 1,024 or 2,048
            on a GPU, fewer for larger models.
        enable_prefix_caching: Keep and reuse the KV blocks of prompts and answers.
        attention_backend: ``"auto"`` takes Triton on a GPU; on a CPU the compiled step with ``quantization="int8"``,
            torch otherwise. ``"torch"`` compiles nothing.
        enforce_eager: On a GPU, launch kernels one by one instead of capturing CUDA graphs: a quicker start,
            slower steps.
        cudagraph_capture_sizes: Batch sizes to capture for decoding; ``None`` takes a built-in list up to
            ``max_num_seqs``.
        engine_host: ``"thread"`` runs the engine in a thread of this process; ``"process"`` in a child process of its
            own, which other threads of this one cannot slow down: it takes some seconds more to start, and ends with
            this process.
        seed: Seeds requests that bring none, in order of arrival, and dummy weights. ``None`` draws
            request seeds from the operating system.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Path
    load_format: LoadFormat = "auto"
    device: str = "auto"
    dtype: DType = "auto"
    quantization: Literal["auto", "fp16", "int8", "none"] | None = "auto"
    block_size: int | None = None
    num_blocks: int | None = Field(default=None, ge=2, le=MOST)
    kv_cache_memory_bytes: int | None = Field(default=None, gt=0, lt=2**63)
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int | None = Field(default=None, ge=1, le=MOST)
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=MOST)
    max_num_batched_tokens_while_streaming: int | None = Field(default=None, ge=1, le=MOST)
    enable_prefix_caching: bool = True
    attention_backend: AttentionBackendName = "auto"
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1, le=MOST)], ...] | None = Field(default=None, min_length=1)
    engine_host: EngineHostName = "thread"
    seed: int | None = None

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        # torch takes cuda:256 for cuda:0.
        if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d?))?", value):
            raise ValueError("must be 'auto', 'cpu', 'cuda', or 'cuda:' and the number of a GPU")
        return value

    @field_validator("quantization")
    @classmethod
    def _none_as_a_word(cls, value: Any) -> Any:
        return None if value == "none" else value

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if value not in (None, 16, 32, 64):
            raise ValueError("must be 16, 32 or 64")
        return value

    @classmethod
    def create(cls, **options: Any) -> EngineConfig:
        """Validate ``options`` and build the config.

        Raises:
            ConfigError: An option is unknown (the nearest known name is suggested) or its value is invalid.
        """
        check_option_names(options, cls.model_fields)
        try:
            return cls(**options)
        except ValidationError as error:
            raise ConfigError(validation_message("engine option", error)) from None


def check_option_names(given: Any, known: Any, other_names: Mapping[str, str] | None = None) -> None:
    """Raise :class:`ConfigError` for the first name in ``given`` that is not in ``known``.

    ``other_names`` are unknown ones of which it is known what they mean.
    """
    for name in given:
        if name not in known:
            meant = (other_names or {}).get(name)
            near = [meant] if meant else difflib.get_close_matches(name, list(known), n=1)
            hint = f"Did you mean {near[0]!r}?" if near else _all_options(known)
            raise ConfigError(f"Unknown option {name!r}. {hint}")


def _all_options(known: Any) -> str:
    if len(known) <= FEW_NAMES:
        return f"Known options: {', '.join(sorted(known))}."
    return "Engine options and sampling parameters are listed in docs/settings.md."


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= 200 else f"{text[:200]}..."


def validation_message(kind: str, error: ValidationError) -> str:
    """One readable sentence per problem of a pydantic error."""
    parts = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        # Nobody has to write tuples.
        text = text.replace("a valid tuple", "a valid list").replace("Tuple", "List")
        parts.append(f"{name}: {text} (got {_shown(problem['input'])})" if name else text)
    return f"Invalid {kind}: " + "; ".join(parts)

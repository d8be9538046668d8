"""Model spec from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedlc_engine.errors import ModelLoadError, UnsupportedModelError
from pagedlc_engine.model.loaders.gguf_file import GGUFFile
from pagedlc_engine.model.spec import SUPPORTED_ARCHITECTURES, ModelSpec, RopeSpec

__all__ = ["spec_from_gguf"]

#: Mistral models are written as "llama" in GGUF files; the two compute the same.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """Read the spec.

    Raises:
        UnsupportedModelError: The architecture, or something in it, is not supported.
        ModelLoadError: A number that every model needs is missing.
    """
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: the GGUF architecture {name!r} is not supported. Supported: {', '.join(_ARCHITECTURES)} "
            f"(that is {', '.join(SUPPORTED_ARCHITECTURES)})."
        )
    if _get(file, "expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported; only dense ones are.")
    heads = _get(file, "attention.head_count")
    hidden = _get(file, "embedding_length")
    layers = _get(file, "block_count")
    if isinstance(heads, list) or isinstance(_get(file, "attention.head_count_kv", heads), list):
        raise UnsupportedModelError(f"{file.path}: head counts that differ between layers are not supported.")
    head_dim = _get(file, "attention.key_length", hidden // heads)
    if _get(file, "rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: rotary embedding over a part of each head is not supported.")
    window = _get(file, "attention.sliding_window", None)
    return ModelSpec(
        architecture=_ARCHITECTURES[name],
        vocab_size=file.tensor("token_embd.weight").shape[0],
        hidden_size=hidden,
        intermediate_size=_get(file, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_get(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=float(_get(file, "attention.layer_norm_rms_epsilon")),
        max_position_embeddings=_get(file, "context_length"),
        rope=_rope(file, head_dim),
        layer_windows=(window or None,) * layers,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_ids=_end_tokens(file),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


_REQUIRED = object()


def _get(file: GGUFFile, key: str, default: Any = _REQUIRED) -> Any:
    full = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full, default)
    if value is _REQUIRED:
        raise ModelLoadError(f"{file.path}: the metadata lacks {full}.")
    return value


def _end_tokens(file: GGUFFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    values = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(value for value in values if value is not None))


def _rope(file: GGUFFile, head_dim: int) -> RopeSpec:
    theta = float(_get(file, "rope.freq_base", 10000.0))
    kind = _get(file, "rope.scaling.type", "none")
    factor = _get(file, "rope.scaling.factor", None)
    if "rope_freqs.weight" in file.tensors:
        factors = np.asarray(file.dequantized("rope_freqs.weight"), dtype=np.float64)
        if factors.shape != (head_dim // 2,):
            raise ModelLoadError(f"{file.path}: rope_freqs.weight should hold {head_dim // 2} numbers.")
        return RopeSpec.scaled(theta, "factors", factors=tuple(factors.tolist()))
    if kind == "none":
        return RopeSpec(theta)
    if kind == "linear" and factor:
        return RopeSpec.scaled(theta, "linear", factor=float(factor))
    if kind == "yarn" and factor:
        original = _get(file, "rope.scaling.original_context_length")
        return RopeSpec.scaled(theta, "yarn", factor=float(factor), original_max_position_embeddings=original)
    raise UnsupportedModelError(f"{file.path}: rotary scaling of type {kind!r} (factor {factor}) is not supported.")

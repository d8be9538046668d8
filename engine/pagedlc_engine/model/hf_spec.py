"""Model spec from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from pagedlc_engine.model.spec import SUPPORTED_ARCHITECTURES, ModelSpec, RopeSpec

__all__ = ["spec_from_config", "spec_from_folder"]

Config = Mapping[str, Any]


def spec_from_folder(folder: Path) -> ModelSpec:
    """Spec from ``config.json``, with the end-of-sequence tokens of ``generation_config.json`` added."""
    file = folder / "config.json"
    if not file.exists():
        raise ModelNotFoundError(f"No config.json in {folder}: a model folder needs one.")
    generation = folder / "generation_config.json"
    return spec_from_config(_read_json(file), _read_json(generation) if generation.exists() else {})


def _read_json(file: Path) -> Config:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} should hold a JSON object.")
    return content


def spec_from_config(config: Config, generation: Config) -> ModelSpec:
    """Spec from the contents of ``config.json`` and ``generation_config.json``.

    Raises:
        UnsupportedModelError: The architecture, or something in it, is not supported.
        ModelLoadError: A number is missing or of the wrong type.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config)
    heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    layers = _number(config, "num_hidden_layers")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        vocab_size=_number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_number(config, "num_key_value_heads", heads),
        head_dim=_number(config, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_context(config),
        rope=_rope(config),
        layer_windows=_windows(config, architecture, layers),
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        o_bias=attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), config.get("eos_token_id")),
        bos_token_id=next(iter(_token_ids(config.get("bos_token_id"))), None),
    )


def _architecture(config: Config) -> str:
    given = config.get("architectures") or []
    named = [given] if isinstance(given, str) else list(given)
    supported = [name for name in named if name in SUPPORTED_ARCHITECTURES]
    if not supported:
        what = ", ".join(map(str, named)) or f"model_type {config.get('model_type')!r}"
        raise UnsupportedModelError(
            f"The model's architecture ({what}) is not supported. Supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    return str(supported[0])


def _refuse_unsupported(config: Config) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"The activation {activation!r} is not supported; supported is 'silu'.")
    if config.get("num_local_experts") or config.get("num_experts"):
        raise UnsupportedModelError("Mixture-of-experts models are not supported; only dense ones are.")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"Weights quantized by {method!r} are not supported; use a GGUF file or the model's original weights."
        )
    if float(_rope_parameters(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModelError("Rotary embedding over a part of each head is not supported.")


def _number(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelLoadError(f"config.json should give {name} as a whole number, but it says {value!r}.")
    return value


def _token_ids(*values: Any) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for value in values:
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def _rope_parameters(config: Config) -> Config:
    """The rotary numbers in either spelling: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError("Rotary embeddings that differ between layers are not supported.")
    return parameters


def _rope(config: Config) -> RopeSpec:
    numbers = dict(_rope_parameters(config))
    theta = float(numbers.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = numbers.pop("rope_type", None) or numbers.pop("type", None) or "default"
    numbers.pop("type", None)
    if kind == "default":
        return RopeSpec(theta)
    original = numbers.get("original_max_position_embeddings") or _number(config, "max_position_embeddings")
    names = _ROPE_NUMBERS.get(kind)
    if names is None:
        raise UnsupportedModelError(
            f"Rotary scaling of type {kind!r} is not supported. Supported: default, {', '.join(_ROPE_NUMBERS)}."
        )
    numbers["original_max_position_embeddings"] = original
    if numbers.get("factor") is None and kind == "yarn":
        numbers["factor"] = _number(config, "max_position_embeddings") / original
    missing = [name for name in names if numbers.get(name) is None]
    if missing:
        raise ModelLoadError(f"config.json's rotary scaling of type {kind!r} lacks {', '.join(missing)}.")
    return RopeSpec.scaled(theta, kind, **{name: value for name, value in numbers.items() if value is not None})


_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _context(config: Config) -> int:
    """Longest sequence: configs with yarn give the original length or the stretched one, the larger counts."""
    longest = _number(config, "max_position_embeddings")
    scaling = _rope(config).scaling
    if scaling is None or scaling["type"] != "yarn":
        return longest
    return max(longest, int(float(str(scaling["factor"])) * int(str(scaling["original_max_position_embeddings"]))))


def _windows(config: Config, architecture: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        full = int(config.get("max_window_layers", layers))
        kinds = ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"Layer types {sorted(unknown)} are not supported.")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)

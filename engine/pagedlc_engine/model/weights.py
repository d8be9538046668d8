"""From files to a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from pagedlc_engine.model.decoder import Decoder, DecoderLayer
from pagedlc_engine.model.half import HalfMethod
from pagedlc_engine.model.int8 import Int8Method
from pagedlc_engine.model.linear import LinearMethod, PlainMethod
from pagedlc_engine.model.loaders.base import WeightSource
from pagedlc_engine.model.loaders.dummy import DummyWeights
from pagedlc_engine.model.loaders.gguf import GGUFWeights
from pagedlc_engine.model.loaders.safetensors import SafetensorsWeights
from pagedlc_engine.model.rope import RotaryEmbedding, interleave
from pagedlc_engine.model.rotation import RotatedWeights
from pagedlc_engine.model.spec import ModelSpec, find_format

__all__ = ["build_decoder", "load_model", "open_weights"]

Progress = Callable[[int, int], None]


def load_model(
    path: Path,
    spec: ModelSpec,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None,
    seed: int,
    progress: Progress | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Read the weights and build the decoder.

    Args:
        path: As for :func:`~pagedlc_engine.model.spec.read_spec`.
        spec: What that function returned.
        load_format: As in :class:`~pagedlc_engine.config.EngineConfig`.
        dtype: Type of weights and activations.
        device: Where the model runs.
        quantization: ``"fp16"`` or ``"int8"`` (CPU, float32), or ``None``.
        seed: For ``load_format="dummy"``.
        progress: Called with (parts done, parts in all).
        max_model_len: Longest sequence in tokens; the model's own limit when ``None``.

    Raises:
        ModelLoadError: A file is damaged, or a tensor is missing or misshapen.
    """
    source = open_weights(path, spec, load_format, dtype, device, seed)
    if quantization == "int8":
        rotated = RotatedWeights(source, spec)
        untied = replace(spec, tie_word_embeddings=False)
        return build_decoder(rotated, untied, Int8Method(), dtype, device, progress, max_model_len)
    method = HalfMethod() if quantization == "fp16" else PlainMethod()
    return build_decoder(source, spec, method, dtype, device, progress, max_model_len)


def open_weights(
    path: Path, spec: ModelSpec, load_format: str, dtype: torch.dtype, device: torch.device, seed: int
) -> WeightSource:
    """The model's single tensors; for the arguments see :func:`load_model`.

    Raises:
        ModelLoadError: A file is damaged, or a tensor is missing or misshapen.
    """
    kind, where = find_format(path, load_format)
    if kind == "dummy":
        return DummyWeights(spec, seed, dtype, device)
    return GGUFWeights(where, spec) if kind == "gguf" else SafetensorsWeights(where, spec)


@torch.inference_mode()
def build_decoder(
    source: WeightSource,
    spec: ModelSpec,
    method: LinearMethod,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Build a decoder from single tensors, layer by layer."""
    builder = _Builder(source, spec, method, dtype, device)
    total = spec.num_layers + 1
    layers = []
    for index in range(spec.num_layers):
        layers.append(builder.layer(f"model.layers.{index}."))
        if progress is not None:
            progress(index + 1, total)
    embedding = builder.tensor("model.embed_tokens.weight")
    head = embedding if spec.tie_word_embeddings else builder.tensor("lm_head.weight")
    rope = RotaryEmbedding(spec.rope, spec.head_dim, max_model_len or spec.max_position_embeddings, device)
    decoder = Decoder(spec, embedding, layers, builder.tensor("model.norm.weight"), method.linear(head, None), rope)
    if progress is not None:
        progress(total, total)
    return decoder


class _Builder:
    """Puts single tensors together into the decoder's fused ones."""

    def __init__(
        self, source: WeightSource, spec: ModelSpec, method: LinearMethod, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.source = source
        self.spec = spec
        self.method = method
        self.dtype = dtype
        self.device = device

    def tensor(self, name: str) -> torch.Tensor:
        return self.source.get(name).to(self.device, self.dtype)

    def layer(self, prefix: str) -> DecoderLayer:
        spec, eps = self.spec, self.spec.rms_norm_eps
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        gate_up = self._stack([mlp + "gate_proj", mlp + "up_proj"], spec.mlp_bias)
        return DecoderLayer(
            qkv=self.method.norm_linear(self.tensor(prefix + "input_layernorm.weight"), eps, *self._qkv(attention)),
            qk_gain=self._qk_gain(attention) if spec.qk_norm else None,
            output=self.method.residual_linear(*self._stack([attention + "o_proj"], spec.o_bias), spiky=False),
            gate_up=self.method.norm_linear(self.tensor(prefix + "post_attention_layernorm.weight"), eps, *gate_up),
            down=self.method.residual_linear(*self._stack([mlp + "down_proj"], spec.mlp_bias), spiky=True),
        )

    def _stack(self, names: list[str], bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else None
        return _joined(weights), None if biases is None else _joined(biases)

    def _qkv(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._rows(prefix, "weight"), self._rows(prefix, "bias") if self.spec.qkv_bias else None

    def _rows(self, prefix: str, kind: str) -> torch.Tensor:
        query, key, value = (self.tensor(f"{prefix}{name}_proj.{kind}") for name in ("q", "k", "v"))
        head_dim = self.spec.head_dim
        return torch.cat([interleave(query, head_dim), interleave(key, head_dim), value])

    def _qk_gain(self, prefix: str) -> torch.Tensor:
        head_dim = self.spec.head_dim
        query = interleave(self.tensor(prefix + "q_norm.weight"), head_dim).expand(self.spec.num_heads, head_dim)
        key = interleave(self.tensor(prefix + "k_norm.weight"), head_dim).expand(self.spec.num_kv_heads, head_dim)
        return torch.cat([query, key])


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

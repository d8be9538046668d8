"""From files to a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pagedlc_engine.model.decoder import Decoder, DecoderLayer
from pagedlc_engine.model.half import HalfMethod
from pagedlc_engine.model.int8 import Int8Method
from pagedlc_engine.model.linear import LinearMethod, PlainMethod
from pagedlc_engine.model.loaders.base import WeightSource, tensor_shapes
from pagedlc_engine.model.loaders.checked import CheckedWeights
from pagedlc_engine.model.loaders.dummy import DummyWeights
from pagedlc_engine.model.loaders.gguf import GGUFWeights
from pagedlc_engine.model.loaders.safetensors import SafetensorsWeights
from pagedlc_engine.model.rope import RotaryEmbedding, interleave
from pagedlc_engine.model.rotation import RotatedWeights
from pagedlc_engine.model.spec import ModelSpec, find_format

__all__ = ["build_decoder", "load_model", "open_weights"]

Progress = Callable[[int, int], None]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
    decoder = build_decoder(source, spec, method, dtype, device, progress, max_model_len)
    source.check()
    return decoder


def open_weights(
    path: Path, spec: ModelSpec, load_format: str, dtype: torch.dtype, device: torch.device, seed: int
) -> CheckedWeights:
    """The model's single tensors; for the arguments see :func:`load_model`.

    Raises:
        ModelLoadError: A file is damaged, or a tensor is missing or misshapen.
    """
    kind, where = find_format(path, load_format)
    if kind == "dummy":
        return CheckedWeights(DummyWeights(spec, seed, dtype, device))
    return CheckedWeights(GGUFWeights(where, spec) if kind == "gguf" else SafetensorsWeights(where, spec, device))


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
    """Build a decoder from single tensors: one after the other on a CPU, several at once on a GPU."""
    builder = _Builder(source, spec, method, dtype, device)
    matrices: dict[str, torch.Tensor] = {}
    layers: dict[int, DecoderLayer] = {}

    def matrix(name: str) -> None:
        matrices[name] = builder.rows([name])

    def layer(index: int) -> None:
        layers[index] = builder.layer(f"model.layers.{index}.")

    # The largest first, so that threads end together.
    names = [_EMBEDDING] if spec.tie_word_embeddings else [_EMBEDDING, _HEAD]
    tasks = [*(partial(matrix, name) for name in names), *(partial(layer, index) for index in range(spec.num_layers))]
    _run(tasks, source.readers, device, progress)
    head = method.linear(matrices.get(_HEAD, matrices[_EMBEDDING]), None)
    rope = RotaryEmbedding(spec.rope, spec.head_dim, max_model_len or spec.max_position_embeddings, device)
    in_order = [layers[index] for index in range(spec.num_layers)]
    return Decoder(spec, matrices[_EMBEDDING], in_order, builder.rows(["model.norm.weight"]), head, rope)


def _run(tasks: Sequence[Callable[[], None]], threads: int, device: torch.device, progress: Progress | None) -> None:
    """Do all tasks; those for a GPU in several threads, of which each queues its copies on the current stream."""
    report = progress or (lambda done, total: None)
    if device.type == "cpu":
        for done, task in enumerate(tasks, start=1):
            task()
            report(done, len(tasks))
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    pool = ThreadPoolExecutor(threads, "pagedlc-load", torch.cuda.set_device, (index,))
    try:
        futures = [pool.submit(torch.inference_mode()(task)) for task in tasks]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            report(done, len(tasks))
    finally:
        pool.shutdown(cancel_futures=True)
    torch.cuda.synchronize(index)


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
        self.shapes = tensor_shapes(spec)

    def rows(self, names: Sequence[str]) -> torch.Tensor:
        """The tensors of these names, one below the other; on a GPU each is read to its place at once."""
        if self.device.type == "cpu":
            parts = [self.source.get(name).to(self.dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        shapes = [self.shapes[name] for name in names]
        heights = [shape[0] for shape in shapes]
        out = torch.empty((sum(heights), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(out, heights), strict=True):
            self.source.read_into(name, part)
        return out

    def layer(self, prefix: str) -> DecoderLayer:
        spec, eps = self.spec, self.spec.rms_norm_eps
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        gate_up = self._stack([mlp + "gate_proj", mlp + "up_proj"], spec.mlp_bias)
        return DecoderLayer(
            qkv=self.method.norm_linear(self.rows([prefix + "input_layernorm.weight"]), eps, *self._qkv(attention)),
            qk_gain=self._qk_gain(attention) if spec.qk_norm else None,
            output=self.method.residual_linear(*self._stack([attention + "o_proj"], spec.o_bias), spiky=False),
            gate_up=self.method.norm_linear(self.rows([prefix + "post_attention_layernorm.weight"]), eps, *gate_up),
            down=self.method.residual_linear(*self._stack([mlp + "down_proj"], spec.mlp_bias), spiky=True),
        )

    def _stack(self, names: list[str], bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self.rows([f"{name}.weight" for name in names])
        return weight, self.rows([f"{name}.bias" for name in names]) if bias else None

    def _qkv(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._heads(prefix, "weight"), self._heads(prefix, "bias") if self.spec.qkv_bias else None

    def _heads(self, prefix: str, kind: str) -> torch.Tensor:
        rows = self.rows([f"{prefix}{name}_proj.{kind}" for name in ("q", "k", "v")])
        turning = rows[: (self.spec.num_heads + self.spec.num_kv_heads) * self.spec.head_dim]
        turning.copy_(interleave(turning, self.spec.head_dim))
        return rows

    def _qk_gain(self, prefix: str) -> torch.Tensor:
        head_dim = self.spec.head_dim
        query = interleave(self.rows([prefix + "q_norm.weight"]), head_dim).expand(self.spec.num_heads, head_dim)
        key = interleave(self.rows([prefix + "k_norm.weight"]), head_dim).expand(self.spec.num_kv_heads, head_dim)
        return torch.cat([query, key])

"""The decoder of :mod:`pagedlc_engine.model.decoder` in fused kernels, over device-resident step descriptions.

Up to sixteen rows every product is a kernel of this package and the whole layer one chain of overlapped launches
(programmatic dependent launch); up to 256 rows the products that are faster so; all others are cuBLAS's, and what lies
between them is fused.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedlc_engine.cuda.layout import StepShape
from pagedlc_engine.errors import ConfigError
from pagedlc_engine.kernels.activation import silu_mul
from pagedlc_engine.kernels.attention_plan import AttentionPlan
from pagedlc_engine.kernels.embedding import embed
from pagedlc_engine.kernels.few_rows import few_rows_linear
from pagedlc_engine.kernels.fused_decode import fused_decode, prefers_fused_decode
from pagedlc_engine.kernels.launch import can_overlap
from pagedlc_engine.kernels.norm import add_rms_norm
from pagedlc_engine.kernels.paged_attention import paged_attention
from pagedlc_engine.kernels.rope_cache import norm_rope_cache
from pagedlc_engine.kernels.streamed_rows import SplitSums, prefers_streaming
from pagedlc_engine.model.decoder import Decoder, DecoderLayer
from pagedlc_engine.model.linear import PlainLinear, PlainNormLinear, PlainResidualLinear
from pagedlc_engine.model.spec import ModelSpec

__all__ = ["FusedDecoder", "StepTensors"]


#: Rows up to which every product is a kernel of this package.
_CHAIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step reads, on the device.

    Args:
        shape: Launch sizes.
        ids: int32 [tokens].
        positions: int32 [tokens].
        cache_slots: int32 [tokens]; negative for padding.
        sample_rows: int32 [samples], rows of the hidden vectors to sample from.
        plan: Attention tiles; the host arrays in it are not used.
        hidden: [tokens, hidden_size], for vectors after the last norm where ``shape.every_row``; otherwise scratch.
        logits: [samples, vocab_size] float32, for the result: rounded to bfloat16, near ones would become equal.
    """

    shape: StepShape
    ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    sample_rows: Tensor
    plan: AttentionPlan
    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's tensors, halves of a rotated head in the kernels' order."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_gain: Tensor | None
    key_gain: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    feed_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


class FusedDecoder:
    """Takes over a decoder's weights: query and key rows are brought into the kernels' order in place.

    Args:
        decoder: On a CUDA device, in plain (not quantized) layers; must not be used afterwards.
        max_model_len: Longest sequence in tokens.

    Raises:
        ConfigError: The decoder's layers are of another kind.
    """

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, max_model_len: int) -> None:
        self.spec = decoder.spec
        self.device = decoder.device
        self.dtype = decoder.dtype
        self._embedding = decoder.embedding
        self._norm = decoder.norm
        if not isinstance(decoder.head, PlainLinear):
            raise ConfigError("The GPU path computes in the model's own type; use quantization=None.")
        self._head = decoder.head.weight
        self._layers = [
            _take_over(None if window is None or window >= max_model_len else window, layer, self.spec)
            for window, layer in zip(self.spec.layer_windows, decoder.layers, strict=True)
        ]
        self._rotation = _rotation_table(decoder, max_model_len)
        self._split_sums = SplitSums(self.device)
        self._scale = float(self.spec.head_dim) ** -0.5

    def one_of_each(self) -> FusedDecoder:
        """A decoder of one layer of each kind and the last: it launches the same kernels, fewer times."""
        few = copy(self)
        kinds = {layer.window is None: layer for layer in self._layers[:-1]}
        few._layers = [*kinds.values(), self._layers[-1]]
        return few

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [S, vocab_size] for hidden vectors [S, hidden_size] after the last norm."""
        return _float32_product(hidden, self._head, hidden.new_empty(len(hidden), len(self._head), dtype=torch.float32))

    def forward(self, step: StepTensors, cache: Tensor) -> Tensor:
        """Run the model over a step; fills ``step.logits``, and ``step.hidden`` where ``step.shape.every_row``.

        Args:
            step: The step.
            cache: [layers, 2, blocks, block_size, kv_heads, head_dim].

        Returns:
            Vectors [samples, hidden_size] that are finite numbers where the logits are.
        """
        if step.shape.decodes and step.shape.tokens <= _CHAIN_ROWS and not step.shape.shared:
            return self._few_rows(step, cache)
        return self._many_rows(step, cache)

    def _few_rows(self, step: StepTensors, cache: Tensor) -> Tensor:
        eps = self.spec.rms_norm_eps
        stream = embed(step.ids, self._embedding, overlap=True)
        alone = len(stream) == 1

        def normed(
            gain: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False, out: Tensor | None = None
        ) -> Tensor:
            x = stream if alone else add_rms_norm(stream, None, gain, eps, overlap=True)
            return few_rows_linear(
                x, weight, gain=gain if alone else None, eps=eps, gated=gated, bias=bias,
                out=out, split_sums=self._split_sums, overlap=True,
            )  # fmt: skip

        def add(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
            few_rows_linear(
                x, weight, bias=bias, residual=stream, out=stream, split_sums=self._split_sums, overlap=True
            )

        for index, layer in enumerate(self._layers):
            projected = normed(layer.attention_norm, layer.qkv, layer.qkv_bias)
            attended = self._attend(layer, projected, step, *cache[index])
            add(attended, layer.output, layer.output_bias)
            add(normed(layer.feed_norm, layer.gate_up, layer.gate_up_bias, gated=True), layer.down, layer.down_bias)
        normed(self._norm, self._head, None, out=step.logits)
        return stream

    def _many_rows(self, step: StepTensors, cache: Tensor) -> Tensor:
        eps = self.spec.rms_norm_eps
        stream = embed(step.ids, self._embedding, overlap=True)
        hidden = add_rms_norm(stream, None, self._layers[0].attention_norm, eps, out=step.hidden, overlap=True)
        gains = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        last = len(self._layers) - 1
        for index, (layer, gain) in enumerate(zip(self._layers, gains, strict=True)):
            projected = self._product(hidden, layer.qkv, layer.qkv_bias)
            attended = self._attend(layer, projected, step, *cache[index])
            if index == last and step.shape.samples_alone:
                attended, stream = embed(step.sample_rows, attended), embed(step.sample_rows, stream)
                hidden = torch.empty_like(stream)
            product = self._product(attended, layer.output, layer.output_bias)
            hidden = add_rms_norm(product, stream, layer.feed_norm, eps, out=hidden, overlap=True)
            gated = self._gated_product(hidden, layer.gate_up, layer.gate_up_bias)
            product = self._product(gated, layer.down, layer.down_bias)
            hidden = add_rms_norm(product, stream, gain, eps, out=hidden, overlap=True)
        alone = step.shape.decodes or step.shape.samples_alone
        rows = hidden if alone else embed(step.sample_rows, hidden)
        if len(rows) <= _CHAIN_ROWS and self._streams(rows, self._head):
            few_rows_linear(rows, self._head, out=step.logits, split_sums=self._split_sums, overlap=True)
        else:
            _float32_product(rows, self._head, step.logits)
        return rows

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._streams(x, weight):
            return few_rows_linear(x, weight, bias=bias, split_sums=self._split_sums, overlap=True)
        return _library_product(x, weight, bias)

    def _gated_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._streams(x, weight, gated=True):
            return few_rows_linear(x, weight, gated=True, bias=bias, split_sums=self._split_sums, overlap=True)
        return silu_mul(_library_product(x, weight, bias), overlap=True)

    def _streams(self, x: Tensor, weight: Tensor, gated: bool = False) -> bool:
        """Whether a product in the midst of cuBLAS's is one of this package's; where launches do not overlap, it would
        gain nothing."""
        if self.dtype == torch.float32 or not can_overlap():
            return False
        return prefers_streaming(len(x), len(weight) // (2 if gated else 1), weight.shape[1], gated)

    def _attend(self, layer: _Layer, projected: Tensor, step: StepTensors, keys: Tensor, values: Tensor) -> Tensor:
        if self._fuses_decode(step.shape):
            out = fused_decode(
                projected, layer.query_gain, layer.key_gain, self._rotation, keys, values, step.plan,
                self.spec.num_heads, scale=self._scale, eps=self.spec.rms_norm_eps, window=layer.window,
                locks=self._split_sums.locks, overlap=True,
            )  # fmt: skip
            return out.view(len(out), -1)
        query = norm_rope_cache(
            projected, layer.query_gain, layer.key_gain, self._rotation, step.positions, step.cache_slots,
            keys, values, self.spec.num_heads, self.spec.rms_norm_eps, overlap=True,
        )  # fmt: skip
        out = paged_attention(query, keys, values, step.plan, scale=self._scale, window=layer.window, overlap=True)
        return out.view(len(out), -1)

    def _fuses_decode(self, shape: StepShape) -> bool:
        alone = shape.decodes and not shape.shared
        return alone and prefers_fused_decode(shape.narrow, shape.narrow_splits, self.spec.num_kv_heads)


def _float32_product(rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``rows @ weight.T`` into float32 ``out``, summed in float32 and not rounded to the operands' type."""
    if rows.dtype == torch.float32:
        return torch.mm(rows, weight.t(), out=out)
    return torch.mm(rows, weight.t(), out_dtype=torch.float32, out=out)


def _library_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _take_over(window: int | None, layer: DecoderLayer, spec: ModelSpec) -> _Layer:
    num_heads, head_dim = spec.num_heads, spec.head_dim
    qkv, output, gate_up, down = layer.qkv, layer.output, layer.gate_up, layer.down
    if not (
        isinstance(qkv, PlainNormLinear)
        and isinstance(output, PlainResidualLinear)
        and isinstance(gate_up, PlainNormLinear)
        and isinstance(down, PlainResidualLinear)
    ):
        raise ConfigError("The GPU path computes in the model's own type; use quantization=None.")
    values = (qkv.weight.shape[0] - num_heads * head_dim) // 2
    turning = qkv.weight.shape[0] - values
    halves_in_place(qkv.weight[:turning], head_dim)
    if qkv.bias is not None:
        halves_in_place(qkv.bias[:turning], head_dim)
    gains = None if layer.qk_gain is None else layer.qk_gain[[0, num_heads]].reshape(-1)
    if gains is not None:
        halves_in_place(gains, head_dim)
    return _Layer(
        attention_norm=qkv.gain,
        qkv=qkv.weight,
        qkv_bias=qkv.bias,
        query_gain=None if gains is None else gains[:head_dim].contiguous(),
        key_gain=None if gains is None else gains[head_dim:].clone(),
        output=output.weight,
        output_bias=output.bias,
        feed_norm=gate_up.gain,
        gate_up=gate_up.weight,
        gate_up_bias=gate_up.bias,
        down=down.weight,
        down_bias=down.bias,
        window=window,
    )


def halves_in_place(rows: Tensor, head_dim: int) -> None:
    """Undo :func:`pagedlc_engine.model.rope.interleave`: the parts of a rotated pair half a head apart again."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))


def _rotation_table(decoder: Decoder, max_model_len: int) -> Tensor:
    """Cosines, then sines of every position: float32 [max_model_len, head_dim]."""
    positions = torch.arange(max_model_len, device=decoder.device, dtype=torch.float32)
    angles = positions[:, None] * decoder.rope.frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).mul_(decoder.rope.amplitude)

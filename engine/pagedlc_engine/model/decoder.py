"""The decoder: one forward pass over the tokens of a step, whichever requests they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from pagedlc_engine.attention.base import LayerAttention
from pagedlc_engine.model.linear import Linear, NormLinear, ResidualLinear
from pagedlc_engine.model.rope import RotaryEmbedding
from pagedlc_engine.model.spec import ModelSpec

__all__ = ["Decoder", "DecoderLayer", "LayerAttention", "StepModel"]


class StepModel(Protocol):
    """What a runner asks of a model."""

    @property
    def spec(self) -> ModelSpec:
        """Shapes and switches."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        """As :meth:`Decoder.forward`; ``attention`` is what the model's own attention backend planned."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As :meth:`Decoder.compute_logits`."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights.

    Args:
        qkv: Norm, then query, key and value rows in this order; query and key rows are interleaved
            (see :mod:`pagedlc_engine.model.rope`).
        qk_gain: Norm weights of the query and key heads ``[num_heads + num_kv_heads, head_dim]``, interleaved;
            ``None`` for models without that norm.
        output: From heads to the residual stream.
        gate_up: Norm, then gate and up rows in this order.
        down: From the inner width to the residual stream.
    """

    qkv: NormLinear
    qk_gain: torch.Tensor | None
    output: ResidualLinear
    gate_up: NormLinear
    down: ResidualLinear


class Decoder:
    """A decoder-only transformer of the Llama family.

    Args:
        spec: Shapes and switches.
        embedding: ``[vocab_size, hidden_size]``.
        layers: One entry per layer.
        norm: Weight of the last norm ``[hidden_size]``.
        head: From hidden vectors to logits.
        rope: Rotations.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
        rope: RotaryEmbedding,
    ) -> None:
        self.spec = spec
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rope = rope
        self.device = embedding.device
        self.dtype = embedding.dtype

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        """Hidden vectors after the last norm.

        Args:
            token_ids: ``[T]`` int64, the tokens of all requests one after the other.
            positions: ``[T]`` int64, each token's place in its own request.
            attention: Knows which tokens may see which.

        Returns:
            ``[T, hidden_size]`` in the model's type.
        """
        stream = functional.embedding(token_ids, self.embedding)
        rotations = self.rope.rotations(positions)
        for index, layer in enumerate(self.layers):
            query, key, value = self._heads(layer, stream, rotations)
            stream = layer.output(attention(index, query, key, value), stream)
            gate, up = layer.gate_up(stream).chunk(2, dim=-1)
            stream = layer.down(functional.silu(gate).mul_(up), stream)
        return functional.rms_norm(stream, self.norm.shape, self.norm, self.spec.rms_norm_eps)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[S, vocab_size]`` float32 for hidden vectors ``[S, hidden_size]``."""
        return self.head(hidden).float()

    def _heads(
        self, layer: DecoderLayer, stream: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value heads; the first two normed (where the model does) and rotated."""
        spec = self.spec
        turning = spec.num_heads + spec.num_kv_heads
        heads = layer.qkv(stream).view(len(stream), -1, spec.head_dim)
        if layer.qk_gain is not None:
            raw = heads[:, :turning]
            torch.mul(functional.rms_norm(raw, (spec.head_dim,), None, spec.rms_norm_eps), layer.qk_gain, out=raw)
        _rotate(heads, turning, rotations)
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return query, key, value


def _rotate(heads: torch.Tensor, count: int, rotations: torch.Tensor) -> None:
    """Turn the pairs of the first ``count`` of ``heads`` ``[T, n, head_dim]``, in place.

    Args:
        heads: Contiguous.
        count: Query and key heads.
        rotations: ``[T, 1, head_dim // 2]`` complex.
    """
    pairs = heads.view(len(heads), -1, heads.shape[-1] // 2, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs)[:, :count].mul_(rotations)
    else:
        part = pairs[:, :count]
        part.copy_(torch.view_as_real(torch.view_as_complex(part.float()) * rotations))

"""One name for every weight, whatever file it comes from."""

from __future__ import annotations

from typing import Protocol

import torch

from pagedlc_engine.model.spec import ModelSpec

__all__ = ["WeightSource", "tensor_shapes"]


class WeightSource(Protocol):
    """Gives weights by their Hugging Face names, one at a time, in Hugging Face's layout.

    Attributes:
        readers: Threads that may read at once to good effect, when weights go to a GPU.
    """

    readers: int = 1

    def get(self, name: str) -> torch.Tensor:
        """The tensor ``name`` on the CPU, in the type the file stores or float32."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor ``name`` into ``out``, contiguous and of the same shape, on any device and of any type.

        On a GPU the copy may only be queued on the current stream.
        """
        out.copy_(self.get(name))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """All tensors a model of this spec needs, by Hugging Face name."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    layer = _layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    matrices = {
        "self_attn.q_proj": (query, hidden, spec.qkv_bias),
        "self_attn.k_proj": (key, hidden, spec.qkv_bias),
        "self_attn.v_proj": (key, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, query, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    for name, (rows, columns, bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes

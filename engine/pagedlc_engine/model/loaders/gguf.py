"""Weights from a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch

from pagedlc_engine.errors import ModelLoadError
from pagedlc_engine.model.loaders.base import WeightSource, tensor_shapes
from pagedlc_engine.model.loaders.gguf_file import GGUFFile
from pagedlc_engine.model.spec import ModelSpec

__all__ = ["GGUFWeights"]

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFWeights(WeightSource):
    """Dequantizes one tensor at a time to float32.

    Args:
        path: The file.
        spec: The spec read from it.

    Raises:
        ModelLoadError: A tensor is missing or has another shape than the spec says.
    """

    #: Each holds a tensor in float32.
    readers = 4

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._file = GGUFFile.open(path)
        self._heads: dict[str, int] = {}
        if self._file.metadata.get("general.architecture") == "llama":
            self._heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
        for name, shape in tensor_shapes(spec).items():
            found = self._file.tensor(_gguf_name(name)).shape
            if found != shape:
                raise ModelLoadError(f"{path}: the tensor {_gguf_name(name)} has shape {found}, expected {shape}.")

    def get(self, name: str) -> torch.Tensor:
        """The tensor ``name``."""
        tensor = torch.from_numpy(self._file.dequantized(_gguf_name(name)))
        heads = self._heads.get(name.split(".")[-2])
        return tensor if heads is None else _split_halves(tensor, heads)


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, index, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_LAYER[stem]}.{kind}"


def _split_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order of llama GGUF files, which puts a rotated pair's two rows side by side."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)

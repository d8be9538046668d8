"""Turning a model's inner space so that 8-bit integers fit it.

A few numbers of a language model's hidden vectors are far larger than the rest, and steps wide enough for them
are too wide for the others. An orthogonal rotation of the hidden space spreads large numbers over all places,
and as every weight that writes to or reads from that space is rotated with it, the model computes the same
(QuaRot, Ashkboos et al. 2024). The rotation costs nothing once the weights are loaded.
"""

from __future__ import annotations

import math

import torch

from pagedlc_engine.model.loaders.base import WeightSource
from pagedlc_engine.model.spec import ModelSpec

__all__ = ["RotatedWeights", "Rotation", "hadamard"]

_BLOCK = 64


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix of a power of two, scaled to be orthogonal; symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def _cosines(size: int) -> torch.Tensor:
    """The orthogonal matrix of the cosine transform (DCT-II), for sizes that have no Hadamard matrix."""
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * places[:, None] * (places + 0.5)) * math.sqrt(2.0 / size)
    matrix[0] /= math.sqrt(2.0)
    return matrix.float()


class Rotation:
    """A fixed rotation of vectors of ``width`` numbers.

    It is a Kronecker product of small orthogonal matrices, so a weight is rotated in a fraction of the time a
    full matrix would take.
    """

    def __init__(self, width: int) -> None:
        odd = width // (width & -width)
        self.factors = [_cosines(odd)] if odd > 1 else []
        rest = width // odd
        while rest > 1:
            size = min(rest, _BLOCK)
            self.factors.append(hadamard(size))
            rest //= size

    def rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Rotate each row of ``vectors`` ``[..., width]``."""
        result = vectors
        after = vectors.shape[-1]
        for factor in self.factors:
            after //= len(factor)
            if after == 1:
                # The same product; torch would multiply a stack of single columns one by one.
                result = result.reshape(-1, len(factor)) @ factor.T
            else:
                result = factor @ result.reshape(-1, len(factor), after)
        return result.reshape(vectors.shape)

    def columns(self, matrix: torch.Tensor) -> torch.Tensor:
        """Rotate each column of ``matrix`` ``[width, in]``."""
        return self.rows(matrix.T).T


class RotatedWeights(WeightSource):
    """The weights of the same model in a rotated hidden space, in float32.

    The norms' weights are moved into the matrices behind them, as a rotation passes only a norm without
    weights. ``lm_head.weight`` therefore differs from the embedding even where the model ties them.

    Args:
        source: The model's weights.
        spec: The model.
    """

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self._source = source
        self._tied = spec.tie_word_embeddings
        self._rotation = Rotation(spec.hidden_size)

    def get(self, name: str) -> torch.Tensor:
        """The tensor ``name``."""
        layer, _, part = name.rpartition(".self_attn." if ".self_attn." in name else ".mlp.")
        if name.endswith("layernorm.weight") or name == "model.norm.weight":
            return torch.ones_like(self._plain(name))
        if name == "model.embed_tokens.weight":
            return self._rotation.rows(self._plain(name))
        if name == "lm_head.weight":
            matrix = "model.embed_tokens.weight" if self._tied else name
            return self._reading(matrix, "model.norm.weight")
        if part in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            return self._reading(name, f"{layer}.input_layernorm.weight")
        if part in ("gate_proj.weight", "up_proj.weight"):
            return self._reading(name, f"{layer}.post_attention_layernorm.weight")
        if part in ("o_proj.weight", "down_proj.weight"):
            return self._rotation.columns(self._plain(name))
        if part in ("o_proj.bias", "down_proj.bias"):
            return self._rotation.rows(self._plain(name))
        return self._plain(name)

    def _plain(self, name: str) -> torch.Tensor:
        return self._source.get(name).float()

    def _reading(self, matrix: str, gain: str) -> torch.Tensor:
        """A matrix that reads the hidden space behind a norm."""
        return self._rotation.rows(self._plain(matrix).mul(self._plain(gain)))

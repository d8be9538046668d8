"""Rotary position embedding (Su et al. 2021) and its scalings.

The two numbers of a rotated pair lie side by side, so that a pair is one complex number and a rotation is one
complex multiplication. Checkpoints keep the pairs half a head apart; :func:`interleave` brings weights into
this order when they are loaded. Queries and keys change alike, so their products stay what they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pagedlc_engine.model.spec import RopeSpec

__all__ = ["RotaryEmbedding", "interleave", "inverse_frequencies"]


class RotaryEmbedding:
    """Rotations for token positions.

    Args:
        spec: Base and scaling.
        head_dim: Numbers per head, even.
        max_model_len: Longest sequence in tokens; only ``dynamic`` scaling depends on it.
        device: Where positions live.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, max_model_len: int, device: torch.device) -> None:
        frequencies, self.amplitude = inverse_frequencies(spec, head_dim, max_model_len)
        self.frequencies = frequencies.to(device)
        self._amplitude = torch.tensor(self.amplitude, device=device)

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Complex rotations ``[T, 1, head_dim // 2]`` for positions ``[T]``."""
        angles = positions[:, None, None].to(torch.float32) * self.frequencies
        return torch.polar(self._amplitude.expand_as(angles), angles)


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the output rows of a query or key weight (or bias, or norm weight) head by head.

    Args:
        rows: ``[heads * head_dim, ...]`` with pairs ``head_dim // 2`` rows apart.
        head_dim: Rows per head.

    Returns:
        The same shape, with pairs next to each other.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def inverse_frequencies(spec: RopeSpec, head_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, and the factor on the rotated vectors.

    ``dynamic`` scaling (NTK-aware, grows with the sequence) cannot be followed token by token over a cache of
    rotated keys, so its base is fixed for the engine: within the original context it is the unscaled base,
    as in a model library; with a longer ``max_model_len`` it is the base for exactly that length.

    Args:
        spec: Base and scaling.
        head_dim: Numbers per head.
        max_model_len: Longest sequence in tokens.

    Returns:
        ``[head_dim // 2]`` float32, and 1.0 except for ``yarn``.
    """
    scaling: Mapping[str, Any] = spec.scaling or {"type": "default"}
    kind = scaling["type"]
    if kind == "dynamic":
        return _plain(_dynamic_base(spec.theta, scaling, head_dim, max_model_len), head_dim), 1.0
    plain = _plain(spec.theta, head_dim)
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
    if kind == "yarn":
        return _yarn(plain, spec.theta, head_dim, scaling), _yarn_amplitude(scaling)
    return plain, 1.0


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return torch.pow(theta, exponents).reciprocal()


def _dynamic_base(theta: float, scaling: Mapping[str, Any], head_dim: int, max_model_len: int) -> float:
    original = scaling["original_max_position_embeddings"]
    stretch = scaling["factor"] * max(max_model_len, original) / original - (scaling["factor"] - 1)
    return float(theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = plain * (original / (2 * math.pi))
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(plain: torch.Tensor, theta: float, head_dim: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (Peng et al. 2023): blend by how often a wave turns within the original context."""
    original = scaling["original_max_position_embeddings"]

    def pair_turning(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(scaling.get("beta_fast", 32))
    high = pair_turning(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / float(scaling["factor"]) * stretch + plain * (1 - stretch)


def _yarn_amplitude(scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return temperature(above) / temperature(below) if above and below else temperature(1.0)

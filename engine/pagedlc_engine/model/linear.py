"""The three ways a decoder multiplies, in the model's own precision.

``NormLinear`` normalizes first, ``ResidualLinear`` adds its result to the residual stream, ``Linear`` does
neither. :mod:`pagedlc_engine.model.int8` has the same three in 8-bit integers; what comes around a product
can be merged into it there.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

__all__ = [
    "Linear",
    "LinearMethod",
    "NormLinear",
    "PlainLinear",
    "PlainMethod",
    "PlainNormLinear",
    "PlainResidualLinear",
    "ResidualLinear",
]


class Linear(Protocol):
    """``x @ weight.T + bias``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is ``[T, in]``, the result ``[T, out]``."""
        ...


class NormLinear(Protocol):
    """RMS norm, then a linear layer."""

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """``stream`` is ``[T, in]``, the result ``[T, out]``."""
        ...


class ResidualLinear(Protocol):
    """A linear layer added to the residual stream."""

    def __call__(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """``x`` is ``[T, in]``, ``stream`` and the result ``[T, out]``."""
        ...


class LinearMethod(Protocol):
    """Makes linear layers out of weights ``[out, in]``."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A bare linear layer."""
        ...

    def norm_linear(
        self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> NormLinear:
        """A linear layer behind an RMS norm of weight ``gain`` ``[in]``."""
        ...

    def residual_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, spiky: bool) -> ResidualLinear:
        """A linear layer in front of the residual stream.

        ``spiky`` says that few of a token's inputs may be far larger than the rest, as behind a gate.
        """
        ...


class PlainLinear:
    """``F.linear``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Linear`."""
        return functional.linear(x, self.weight, self.bias)


class PlainNormLinear:
    """``F.rms_norm`` and ``F.linear``."""

    def __init__(self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.gain = gain
        self.eps = eps
        self.weight = weight
        self.bias = bias

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """See :class:`NormLinear`."""
        normed = functional.rms_norm(stream, self.gain.shape, self.gain, self.eps)
        return functional.linear(normed, self.weight, self.bias)


class PlainResidualLinear:
    """``F.linear`` and an addition."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """See :class:`ResidualLinear`."""
        return functional.linear(x, self.weight, self.bias).add_(stream)


class PlainMethod:
    """Linear layers in the weights' own type."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PlainLinear:
        """See :class:`LinearMethod`."""
        return PlainLinear(weight, bias)

    def norm_linear(
        self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PlainNormLinear:
        """See :class:`LinearMethod`."""
        return PlainNormLinear(gain, eps, weight, bias)

    def residual_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, spiky: bool) -> PlainResidualLinear:
        """See :class:`LinearMethod`."""
        return PlainResidualLinear(weight, bias)

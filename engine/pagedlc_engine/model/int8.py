"""Linear layers in 8-bit integers on a CPU, through torch's FBGEMM kernels.

Weights are rounded to int8 with one scale per output row. Activations are rounded while the product runs:
each token's vector is divided by its largest magnitude, so that the kernel's fixed scale fits every token,
and the result is multiplied back. A token's numbers therefore never depend on the other tokens of the batch,
as they would with one scale for the whole batch.

How well this works depends on the largest number of a vector not standing out: load the weights through
:class:`~pagedlc_engine.model.rotation.RotatedWeights`.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch

from pagedlc_engine.model.fbgemm import fbgemm_available, fbgemm_engine
from pagedlc_engine.model.rotation import hadamard

__all__ = [
    "Int8Linear",
    "Int8Method",
    "Int8NormLinear",
    "Int8ResidualLinear",
    "activation_levels",
    "int8_available",
    "pack",
]

#: Keeps a vector of zeros from being divided by zero.
_SMALLEST = 1e-30
#: Inputs per block that a Hadamard matrix spreads.
_SPREAD = 32


def int8_available() -> bool:
    """Whether this torch has the FBGEMM kernels, for this CPU."""
    return hasattr(torch, "_make_per_channel_quantized_tensor") and fbgemm_available(
        "linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32"
    )


@functools.cache
def activation_levels() -> int:
    """How many integer steps the largest activation may take: 127 or 63.

    Without VNNI instructions the kernels add pairs of products in 16 bits, which overflow when both are
    large; 63 steps are always safe. The worst case is tried out once on this CPU.
    """
    weight = torch.full((16, 64), 1.0)
    ones = torch.ones(2, 64)
    exact = torch.tensor([[64.0], [-64.0]]).expand(2, 16)
    found = _product(torch.cat([ones[:1], -ones[:1]]), pack(weight, torch.full((16,), 1.0 / 127)), 127)
    return 127 if torch.allclose(found, exact, rtol=1e-3) else 63


def pack(weight: torch.Tensor, scales: torch.Tensor) -> Any:
    """FBGEMM's layout of ``weight`` ``[out, in]`` rounded to int8 steps of ``scales`` ``[out]``."""
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    steps = (weight / scales[:, None]).round_().to(torch.int8)
    with warnings.catch_warnings():
        # torch announces that these tensors will go; int8_available() notices when they have.
        warnings.filterwarnings("ignore", message=".*deprecated.*", category=UserWarning)
        rounded = torch._make_per_channel_quantized_tensor(steps, scales.double(), zeros, 0)
    with fbgemm_engine():
        return torch.ops.quantized.linear_prepack(rounded, None)


def _product(x: torch.Tensor, packed: Any, levels: int) -> torch.Tensor:
    """``x @ weight.T`` for ``x`` within -1 and 1, rounded to ``levels`` steps on either side of zero."""
    kernel = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    result: torch.Tensor = kernel(x, 1.0 / levels, levels + 1, packed)
    return result


class _Int8Weight:
    """A packed weight; ``factor`` is multiplied into it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, factor: float = 1.0) -> None:
        weight = weight.float()
        scales = weight.abs().amax(dim=1).clamp_min_(_SMALLEST) / 127
        self.packed = pack(weight.mul(factor) if factor != 1.0 else weight, scales * factor)
        self.bias = None if bias is None else bias.float()
        self.levels = activation_levels()


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(dim=-1, keepdim=True).clamp_min_(_SMALLEST)


class Int8Linear(_Int8Weight):
    """See :class:`~pagedlc_engine.model.linear.Linear`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``, float32."""
        largest = _largest(x)
        product = _product(x / largest, self.packed, self.levels)
        return product.mul_(largest) if self.bias is None else torch.addcmul(self.bias, product, largest)


class Int8NormLinear(_Int8Weight):
    """See :class:`~pagedlc_engine.model.linear.NormLinear`.

    The norm divides a token's vector by one number, and so does the rounding: both divisions are made at once.
    The norm's weights are multiplied into the matrix.
    """

    def __init__(self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        width = weight.shape[1]
        super().__init__(weight.float() * gain.float(), bias, math.sqrt(width))
        self.floor = torch.tensor(math.sqrt(width * eps))

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``, float32."""
        largest = _largest(stream)
        product = _product(stream / largest, self.packed, self.levels)
        # sqrt(sum of squares + width * eps); sqrt(width) is in the weight.
        length = torch.hypot(torch.linalg.vector_norm(stream, dim=-1, keepdim=True), self.floor)
        factor = largest.div_(length)
        return product.mul_(factor) if self.bias is None else torch.addcmul(self.bias, product, factor)


class Int8ResidualLinear(_Int8Weight):
    """See :class:`~pagedlc_engine.model.linear.ResidualLinear`.

    ``spiky`` inputs are spread over blocks by a Hadamard matrix, whose inverse is in the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, spiky: bool) -> None:
        width = weight.shape[1]
        self.block = min(_SPREAD, width & -width) if spiky else 1
        self.spread = hadamard(self.block)
        if self.block > 1:
            weight = self._spread(weight.float())
        super().__init__(weight, bias)

    def __call__(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` and ``[T, out]`` to ``[T, out]``, float32."""
        if self.block > 1:
            x = self._spread(x)
        largest = _largest(x)
        product = _product(x / largest, self.packed, self.levels)
        if self.bias is not None:
            stream = stream + self.bias
        return torch.addcmul(stream, product, largest)

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1, self.block) @ self.spread).view(x.shape)


class Int8Method:
    """Linear layers in 8-bit integers."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
        """See :class:`~pagedlc_engine.model.linear.LinearMethod`."""
        return Int8Linear(weight, bias)

    def norm_linear(
        self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Int8NormLinear:
        """See :class:`~pagedlc_engine.model.linear.LinearMethod`."""
        return Int8NormLinear(gain, eps, weight, bias)

    def residual_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, spiky: bool) -> Int8ResidualLinear:
        """See :class:`~pagedlc_engine.model.linear.LinearMethod`."""
        return Int8ResidualLinear(weight, bias, spiky)

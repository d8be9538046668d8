"""Linear layers with weights in half precision on a CPU, through torch's FBGEMM kernels.

Weights take half the memory, which is what a decode step spends its time reading. Activations and sums stay in
float32: unlike with 8-bit activations, a token's numbers keep to within float32 rounding whatever else is in the
batch, so that answers repeat.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pagedlc_engine.model.fbgemm import fbgemm_available, fbgemm_engine

__all__ = ["HalfLinear", "HalfMethod", "HalfNormLinear", "HalfResidualLinear", "half_available"]


def half_available() -> bool:
    """Whether this torch has the FBGEMM kernels, for this CPU."""
    return fbgemm_available("linear_prepack_fp16", "linear_dynamic_fp16")


class HalfLinear:
    """See :class:`~pagedlc_engine.model.linear.Linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with fbgemm_engine():
            self.packed = torch.ops.quantized.linear_prepack_fp16(
                weight.float(), None if bias is None else bias.float()
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``, float32."""
        result: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return result


class HalfNormLinear(HalfLinear):
    """See :class:`~pagedlc_engine.model.linear.NormLinear`."""

    def __init__(self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.gain = gain.float()
        self.eps = eps

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``, float32."""
        return super().__call__(functional.rms_norm(stream, self.gain.shape, self.gain, self.eps))


class HalfResidualLinear:
    """See :class:`~pagedlc_engine.model.linear.ResidualLinear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.linear = HalfLinear(weight, bias)

    def __call__(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` and ``[T, out]`` to ``[T, out]``, float32."""
        return self.linear(x).add_(stream)


class HalfMethod:
    """Linear layers with weights in half precision."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> HalfLinear:
        """See :class:`~pagedlc_engine.model.linear.LinearMethod`."""
        return HalfLinear(weight, bias)

    def norm_linear(
        self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> HalfNormLinear:
        """See :class:`~pagedlc_engine.model.linear.LinearMethod`."""
        return HalfNormLinear(gain, eps, weight, bias)

    def residual_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, spiky: bool) -> HalfResidualLinear:
        """See :class:`~pagedlc_engine.model.linear.LinearMethod`; spikes need no care in float32."""
        return HalfResidualLinear(weight, bias)

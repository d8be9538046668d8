"""Products with weights in half precision: as exact as the weights, and near enough to float32 not to matter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pagedlc_engine.model.half import HalfLinear, HalfNormLinear, HalfResidualLinear, half_available

pytestmark = pytest.mark.skipif(not half_available(), reason="torch without FBGEMM")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])) * 0.3


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("bias", [None, draw(112)])
def test_the_product_is_that_of_the_rounded_weights(rows: int, bias: torch.Tensor | None) -> None:
    weight, x = draw(112, 192), draw(rows, 192)
    found = HalfLinear(weight, bias)(x)
    torch.testing.assert_close(found, functional.linear(x, weight.half().float(), bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, functional.linear(x, weight, bias), rtol=1e-2, atol=1e-2)


def test_the_norm_comes_first_and_the_residual_last() -> None:
    weight, stream, gain = draw(96, 64), draw(5, 64), draw(64)
    half = weight.half().float()
    normed = functional.rms_norm(stream, (64,), gain, 1e-5)
    found = HalfNormLinear(gain, 1e-5, weight, None)(stream)
    torch.testing.assert_close(found, functional.linear(normed, half), rtol=1e-5, atol=1e-5)
    residual = draw(5, 96)
    found = HalfResidualLinear(weight, None)(stream, residual)
    torch.testing.assert_close(found, functional.linear(stream, half) + residual, rtol=1e-5, atol=1e-5)


def test_the_process_keeps_the_engine_it_has_chosen() -> None:
    before = torch.backends.quantized.engine
    HalfLinear(draw(16, 16), None)
    assert torch.backends.quantized.engine == before

"""The 8-bit products: how exact they are, and that tokens do not disturb each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from pagedlc_engine.model.int8 import (
    Int8Linear,
    Int8NormLinear,
    Int8ResidualLinear,
    activation_levels,
    int8_available,
)
from pagedlc_engine.model.rotation import RotatedWeights, Rotation, hadamard

pytestmark = pytest.mark.skipif(not int8_available(), reason="torch without FBGEMM")


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(112, 192, generator=torch.Generator().manual_seed(1)) * 0.1


def inputs(rows: int, width: int = 192) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def integer_reference(x: torch.Tensor, weight: torch.Tensor, levels: int) -> torch.Tensor:
    """What the kernels should compute, in exact integers."""
    row_scale = x.abs().amax(1, keepdim=True).double()
    weight_scale = weight.abs().amax(1).double() / 127
    steps = (x.double() / row_scale * levels).round().long()
    weights = (weight.double() / weight_scale[:, None]).round().long()
    return (steps @ weights.T).double() * row_scale / levels * weight_scale


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_product_is_the_integer_product(weight: torch.Tensor, rows: int) -> None:
    x = inputs(rows)
    expected = integer_reference(x, weight, activation_levels())
    error = (Int8Linear(weight, None)(x).double() - expected).abs().max()
    # A number that lies on the border of two steps may be rounded to either.
    assert error <= 2 * x.abs().max() / activation_levels() * weight.abs().max()


@pytest.mark.parametrize("width", [64, 576, 1536])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_numbers_everywhere_do_not_overflow(width: int, sign: float) -> None:
    weight = torch.ones(48, width)
    weight[::2] = -1.0
    found = Int8Linear(weight, None)(torch.full((5, width), sign))
    torch.testing.assert_close(found, sign * width * weight[:, 0].expand(5, 48), rtol=1e-4, atol=0.0)


def test_error_is_a_percent(weight: torch.Tensor) -> None:
    x = inputs(64)
    exact = functional.linear(x, weight)
    assert (Int8Linear(weight, None)(x) - exact).norm() < 0.02 * exact.norm()


def test_norm_bias_and_residual_are_merged_correctly(weight: torch.Tensor) -> None:
    x, stream = inputs(9) * 5, inputs(9, 112)
    gain, bias = torch.rand(192) + 0.5, torch.randn(112)
    normed = functional.linear(functional.rms_norm(x, (192,), gain, 1e-5), weight, bias)
    assert (Int8NormLinear(gain, 1e-5, weight, bias)(x) - normed).norm() < 0.02 * normed.norm()
    added = functional.linear(x, weight, bias) + stream
    for spiky in (False, True):
        assert (Int8ResidualLinear(weight, bias, spiky)(x, stream) - added).norm() < 0.02 * added.norm()


def test_norm_of_tiny_vectors_keeps_its_epsilon(weight: torch.Tensor) -> None:
    x = inputs(3) * 1e-3
    exact = functional.linear(functional.rms_norm(x, (192,), None, 1e-4), weight)
    assert (Int8NormLinear(torch.ones(192), 1e-4, weight, None)(x) - exact).norm() < 0.02 * exact.norm()


def test_a_row_does_not_depend_on_the_others(weight: torch.Tensor) -> None:
    x, stream = inputs(32), inputs(32, 112)
    x[3] *= 1e4
    layers = [
        lambda rows: Int8Linear(weight, None)(x[rows]),
        lambda rows: Int8NormLinear(torch.ones(192), 1e-5, weight, None)(x[rows]),
        lambda rows: Int8ResidualLinear(weight, None, False)(x[rows], stream[rows]),
    ]
    for layer in layers:
        together = layer(slice(None))
        for row in (0, 3, 31):
            torch.testing.assert_close(layer(slice(row, row + 1))[0], together[row], rtol=1e-5, atol=1e-6)


def test_zeros_stay_zeros(weight: torch.Tensor) -> None:
    zeros = torch.zeros(2, 192)
    assert not Int8Linear(weight, None)(zeros).any()
    assert not Int8NormLinear(torch.ones(192), 1e-5, weight, None)(zeros).any()
    assert not Int8Linear(torch.zeros(16, 192), None)(inputs(2)).any()


@pytest.mark.parametrize("width", [64, 96, 576, 896, 7, 2048])
def test_rotations_are_orthogonal_and_spread_a_spike(width: int) -> None:
    rotation = Rotation(width)
    matrix = rotation.rows(torch.eye(width))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(rotation.columns(torch.eye(width)), matrix.T)
    assert matrix[0].abs().max() <= math.sqrt(2.0 / width) + 1e-6


def test_spikes_behind_the_gate_cost_no_precision(weight: torch.Tensor) -> None:
    x, nothing = inputs(16), torch.zeros(16, 112)
    x[:, 10] *= 100.0
    rest = x.clone()
    rest[:, 10] = 0.0
    exact = functional.linear(rest, weight)

    def error(spiky: bool) -> float:
        layer = Int8ResidualLinear(weight, None, spiky)
        return float((layer(x, nothing) - functional.linear(x, weight)).norm() / exact.norm())

    assert error(True) < 0.5 * error(False)


def test_hadamard_matrix_is_its_own_inverse() -> None:
    torch.testing.assert_close(hadamard(32) @ hadamard(32), torch.eye(32))


def test_rotated_weights_are_the_same_model() -> None:
    from model_helpers import TINY, decoder_logits

    from pagedlc_engine.model.hf_spec import spec_from_config
    from pagedlc_engine.model.linear import PlainMethod
    from pagedlc_engine.model.loaders.dummy import DummyWeights
    from pagedlc_engine.model.weights import build_decoder

    cpu = torch.device("cpu")
    spec = spec_from_config({**TINY, "architectures": ["LlamaForCausalLM"]}, {})
    source = DummyWeights(spec, 0, torch.float32, cpu)
    plain = build_decoder(source, spec, PlainMethod(), torch.float32, cpu)
    rotated = build_decoder(RotatedWeights(source, spec), spec, PlainMethod(), torch.float32, cpu)
    tokens = torch.arange(20)
    torch.testing.assert_close(decoder_logits(rotated, tokens), decoder_logits(plain, tokens), rtol=1e-4, atol=1e-4)

"""Rotary frequencies agree with transformers' for every scaling, and rotations with the textbook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_helpers import TINY
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagedlc_engine.model.hf_spec import spec_from_config
from pagedlc_engine.model.rope import RotaryEmbedding, interleave, inverse_frequencies
from pagedlc_engine.model.spec import RopeSpec

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
]


def spec_of(config: LlamaConfig) -> RopeSpec:
    return spec_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, {}).rope


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(**{**TINY, "head_dim": 64, "rope_parameters": {**scaling, "rope_theta": 5e4}})
    expected, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    found, found_amplitude = inverse_frequencies(spec_of(config), 64, config.max_position_embeddings)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert found_amplitude == pytest.approx(amplitude)


def test_dynamic_scaling_stretches_for_the_longest_sequence_allowed() -> None:
    config = LlamaConfig(
        **{**TINY, "head_dim": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=512)
    found, _ = inverse_frequencies(spec_of(config), 64, 512)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    plain, _ = inverse_frequencies(RopeSpec(1e4), 64, 512)
    assert torch.equal(inverse_frequencies(spec_of(config), 64, 16)[0], plain)


def test_old_and_new_spelling_mean_the_same() -> None:
    base = {**TINY, "architectures": ["LlamaForCausalLM"]}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4}}
    old = {"rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert spec_from_config({**base, **new}, {}).rope == spec_from_config({**base, **old}, {}).rope


def test_interleaved_rotation_is_the_rotation_of_halves() -> None:
    rope = RotaryEmbedding(RopeSpec(1e4), 8, 32, torch.device("cpu"))
    vectors, positions = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 31])
    angles = positions[:, None] * rope.frequencies
    low, high = vectors.chunk(2, dim=-1)
    halves = torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)
    pairs = torch.view_as_complex(interleave(vectors.T, 8).T.reshape(5, 4, 2).contiguous())
    turned = torch.view_as_real(pairs * rope.rotations(positions)[:, 0]).flatten(1)
    torch.testing.assert_close(turned, interleave(halves.T, 8).T)

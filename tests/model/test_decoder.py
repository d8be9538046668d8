"""The decoder computes what transformers computes, for every supported architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import TINY, decoder_logits, load, randomize
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pagedlc_engine.model import load_model, read_spec

Tokens = Callable[[int], torch.Tensor]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}

MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama tied, llama3 rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 32}),
    "llama, linear rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama, dynamic rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 16, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2, windows in the upper layers": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3, yarn rope": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3 tied with biases": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    kind, config, options = MODELS[request.param]
    torch.manual_seed(0)
    model = randomize(kind(config(**{**TINY, **options}, attn_implementation="eager")))
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder, model


def test_logits_are_those_of_transformers(saved: tuple[Path, PreTrainedModel], tokens: Tokens) -> None:
    folder, model = saved
    with torch.no_grad():
        expected = model(tokens(60)[None]).logits[0]
    found = decoder_logits(load(folder), tokens(60))
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


def test_int8_stays_close_for_every_architecture(saved: tuple[Path, PreTrainedModel], tokens: Tokens) -> None:
    folder, model = saved
    with torch.no_grad():
        expected = model(tokens(60)[None]).logits[0]
    found = decoder_logits(load(folder, "int8"), tokens(60))
    assert (found - expected).norm() < 0.2 * expected.norm()


def test_sharded_checkpoint(tiny_llama: tuple[Path, LlamaForCausalLM], tmp_path: Path, tokens: Tokens) -> None:
    folder, model = tiny_llama
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(decoder_logits(load(tmp_path), tokens(20)), decoder_logits(load(folder), tokens(20)))


def test_bfloat16_checkpoint_is_computed_in_the_type_asked_for(tmp_path: Path, tokens: Tokens) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).bfloat16().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens(20)[None]).logits[0]
    torch.testing.assert_close(decoder_logits(load(tmp_path), tokens(20)), expected, rtol=1e-4, atol=2e-4)


def test_a_token_does_not_depend_on_the_step_it_is_computed_in(
    tiny_llama: tuple[Path, LlamaForCausalLM], tokens: Tokens
) -> None:
    decoder = load(tiny_llama[0])

    def nothing_seen(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query.flatten(1) * key.repeat_interleave(3, 1).flatten(1)

    ids, positions = tokens(30), torch.arange(30)
    together = decoder.forward(ids, positions, nothing_seen)
    alone = decoder.forward(ids[17:18], positions[17:18], nothing_seen)
    torch.testing.assert_close(together[17:18], alone, rtol=1e-4, atol=1e-4)


def test_progress_ends_at_the_total(tiny_llama: tuple[Path, LlamaForCausalLM]) -> None:
    folder, _ = tiny_llama
    seen: list[tuple[int, int]] = []
    cpu = torch.device("cpu")
    load_model(folder, read_spec(folder), "auto", torch.float32, cpu, None, 0, lambda *done: seen.append(done))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert all(total == len(seen) for _, total in seen)


def test_dummy_weights_need_only_a_config(
    tiny_llama: tuple[Path, LlamaForCausalLM], tmp_path: Path, tokens: Tokens
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_llama[0] / "config.json").read_bytes())
    first, again, other = (
        decoder_logits(load(tmp_path, load_format="dummy", seed=seed), tokens(10)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.isfinite(first).all()


def test_half_precision_follows_single_precision(saved: tuple[Path, PreTrainedModel], tokens: Tokens) -> None:
    folder, _ = saved
    exact = decoder_logits(load(folder), tokens(20))
    spec = read_spec(folder)
    decoder = load_model(folder, spec, "auto", torch.bfloat16, torch.device("cpu"), None, 0)
    rough = decoder_logits(decoder, tokens(20))
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.1 * exact.norm()

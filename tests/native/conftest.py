"""The compiled library, and tiny models whose sizes the native step can run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pagedlc_engine.native import Library
from pagedlc_engine.native.compiler import BuildError, build
from tests.model.model_helpers import TINY, randomize

SIZES = {**TINY, "head_dim": 32, "max_position_embeddings": 512}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases, tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24, "head_dim": 64}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 192}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 96}),
}


@pytest.fixture(scope="session")
def library() -> Library:
    try:
        return Library(str(build()))
    except BuildError as error:
        pytest.skip(f"no native step here: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Makes the folder of one of :data:`MODELS`, and transformers' model in it."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            kind, config, options = MODELS[name]
            torch.manual_seed(0)
            model = randomize(kind(config(**{**SIZES, **options}, attn_implementation="eager")))
            folder = tmp_path_factory.mktemp("native-model")
            model.save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return make

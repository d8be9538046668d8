"""What read_spec makes of folders, good and bad, before any weight is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import TINY, load
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from pagedlc_engine.model import read_spec

Edit = Callable[..., Path]


@pytest.fixture
def edited(tiny_llama: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> Edit:
    """A copy of the tiny model with changes in config.json; ``None`` removes a key."""

    def make(**changes: Any) -> Path:
        for file in tiny_llama[0].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = {**json.loads((tmp_path / "config.json").read_text()), **changes}
        text = json.dumps({key: value for key, value in config.items() if value is not None})
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return make


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_numbers_of_a_config(edited: Edit) -> None:
    folder = edited()
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    spec = read_spec(folder)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 6, 2, 16)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (199, 96, 160)
    assert spec.eos_token_ids == (9, 7)
    assert spec.bos_token_id == 1
    assert spec.sliding_window is None
    assert spec.rope.theta == 10000.0


def test_spec_travels_between_processes(edited: Edit) -> None:
    spec = read_spec(edited(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_yarn_stretches_the_context(edited: Edit) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_spec(edited(rope_parameters=None, rope_scaling=scaling)).max_position_embeddings == 512


def test_mistral_window_counts_for_every_layer(edited: Edit) -> None:
    spec = read_spec(edited(architectures=["MistralForCausalLM"], sliding_window=32))
    assert spec.layer_windows == (32, 32, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "'bert'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_local_experts": 8}, "[Mm]ixture-of-experts"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'.*yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of each head"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    ],
)
def test_unsupported_models_are_refused(edited: Edit, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(edited(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "many"}, "hidden_size.*'many'"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"vocab_size": 200}, r"(embed_tokens|lm_head)\.weight has shape \(199, 96\)"),
        ({"num_hidden_layers": 4}, r"layers\.3\..* is missing"),
        ({"num_hidden_layers": 2}, r"layers\.2\..* not part of the model"),
    ],
)
def test_contradictions_are_named(edited: Edit, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(edited(**changes))


def test_missing_extra_and_misshapen_tensors_are_named(edited: Edit) -> None:
    folder = edited()
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        read_spec(folder)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(160, 95)}))
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \(160, 95\)"):
        read_spec(folder)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(160, 96), "model.extra": torch.ones(2)}))
    with pytest.raises(ModelLoadError, match=r"model\.extra is not part"):
        read_spec(folder)


def test_tensors_that_nobody_needs_are_ignored(edited: Edit) -> None:
    folder = edited()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    load(folder)


@pytest.mark.parametrize("keep", [4, 50, 2000, -1])
def test_truncated_safetensors(edited: Edit, keep: int) -> None:
    folder = edited()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is (truncated|damaged)"):
        read_spec(folder)


def test_garbage_is_not_a_model(tmp_path: Path) -> None:
    garbage = tmp_path / "notes.gguf"
    garbage.write_bytes(b"these are only words")
    with pytest.raises(ModelNotFoundError, match="not a model"):
        read_spec(garbage)
    garbage.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="not a model"):
        read_spec(garbage)


@pytest.mark.parametrize("share", [0.00001, 0.001, 0.01, 0.5, 0.999999])
def test_truncated_gguf(tmp_path: Path, share: float) -> None:
    from pagedlc.models import resolve_model

    whole = resolve_model("smollm2").path
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        cut.write_bytes(file.read(int(whole.stat().st_size * share)))
    with pytest.raises(ModelLoadError, match="truncated"):
        read_spec(cut)


def test_places_without_a_model(edited: Edit, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="No model in"):
        read_spec(tmp_path)
    folder = edited()
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(ModelNotFoundError, match=r"No config\.json"):
        read_spec(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        read_spec(folder)


def test_broken_config(edited: Edit) -> None:
    folder = edited()
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        read_spec(folder)


def test_missing_shard(edited: Edit) -> None:
    folder = edited()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors"):
        read_spec(folder)


def test_config_may_use_the_old_names(edited: Edit) -> None:
    new = read_spec(edited())
    assert read_spec(edited(rope_parameters=None, rope_theta=10000.0)) == new
    assert TINY["hidden_size"] == new.hidden_size

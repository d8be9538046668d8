"""GGUF files: every quantization, the default model, and files written by the gguf library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from model_helpers import TINY, decoder_logits, load
from transformers import LlamaForCausalLM

from pagedlc_engine.errors import ModelLoadError, UnsupportedModelError
from pagedlc_engine.model import read_spec
from pagedlc_engine.model.loaders.gguf_file import GGUFFile

WRITABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
READ_ONLY = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, metadata.pop("arch", "llama"))
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", WRITABLE)
def test_values_survive_their_quantization(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, Kind[name])
    file = GGUFFile.open(write(tmp_path / "a.gguf", {"t": (raw, Kind[name])}))
    found = file.dequantized("t")
    assert found.shape == (5, 64)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, Kind[name]).reshape(5, 64))
    assert np.abs(found - values).max() < {"4": 0.5, "5": 0.25, "8": 0.03}.get(name[1], 0.02)


@pytest.mark.parametrize("name", READ_ONLY)
def test_k_quants_are_read(tmp_path: Path, name: str) -> None:
    raw = np.random.default_rng(0).integers(0, 60, size=(3, READ_ONLY[name]), dtype=np.uint8)
    file = GGUFFile.open(write(tmp_path / "a.gguf", {"t": (raw, Kind[name])}))
    np.testing.assert_array_equal(file.dequantized("t"), gguf.quants.dequantize(raw, Kind[name]))
    assert file.tensor("t").shape == (3, 256)


def test_other_quantizations_are_refused_by_name(tmp_path: Path) -> None:
    raw = np.zeros((2, 84), dtype=np.uint8)
    path = write(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (raw, Kind.Q2_K)})
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.weight.*Q2_K.*Q4_K"):
        read_spec(path)


def test_header_agrees_with_the_library(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.gguf",
        {"one": (np.ones((3, 32), np.float32), Kind.F32), "two": (np.full((7,), 2.0, np.float32), Kind.F32)},
        general__name="naïve",
        llama__block_count=3,
        llama__rope__freq_base=5e5,
        tokenizer__ggml__tokens=[f"token{number}" for number in range(5000)],
        tokenizer__ggml__scores=[float(number) for number in range(5000)],
        tokenizer__ggml__eos_token_id=4,
        short=["a", "b"],
    )
    file = GGUFFile.open(path)
    assert file.metadata["general.name"] == "naïve"
    assert file.metadata["llama.rope.freq_base"] == 5e5
    assert file.metadata["tokenizer.ggml.eos_token_id"] == 4
    assert file.metadata["short"] == ["a", "b"]
    for tensor in gguf.GGUFReader(path).tensors:
        assert file.tensor(tensor.name).offset == tensor.data_offset
        np.testing.assert_array_equal(file.dequantized(tensor.name), np.asarray(tensor.data))


def llama_gguf(path: Path, model: LlamaForCausalLM, **changes: Any) -> Path:
    """What llama.cpp's converter writes: its names, and query/key rows with pairs side by side."""
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    tensors = {}
    for name, weight in model.state_dict().items():
        pieces = name.split(".")
        data = weight.numpy()
        if pieces[-2] in ("q_proj", "k_proj"):
            heads = TINY["num_attention_heads" if pieces[-2] == "q_proj" else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        stem = names.get(pieces[-2]) or f"blk.{pieces[2]}.{parts[pieces[-2]]}"
        tensors[f"{stem}.weight"] = (np.ascontiguousarray(data), Kind.F32)
    tensors.update(changes.pop("tensors", {}))
    metadata: dict[str, Any] = {
        "llama__block_count": TINY["num_hidden_layers"],
        "llama__context_length": TINY["max_position_embeddings"],
        "llama__embedding_length": TINY["hidden_size"],
        "llama__feed_forward_length": TINY["intermediate_size"],
        "llama__attention__head_count": TINY["num_attention_heads"],
        "llama__attention__head_count_kv": TINY["num_key_value_heads"],
        "llama__attention__layer_norm_rms_epsilon": TINY["rms_norm_eps"],
        "tokenizer__ggml__eos_token_id": 7,
        "tokenizer__ggml__eot_token_id": 9,
    }
    return write(path, tensors, **{**metadata, **changes})


def test_llama_gguf_is_the_model_it_was_made_of(
    tmp_path: Path, tiny_llama: tuple[Path, LlamaForCausalLM], tokens: Any
) -> None:
    folder, model = tiny_llama
    path = llama_gguf(tmp_path / "m.gguf", model)
    assert read_spec(path).eos_token_ids == (7, 9)
    expected = decoder_logits(load(folder), tokens(40))
    torch.testing.assert_close(decoder_logits(load(path), tokens(40)), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(decoder_logits(load(tmp_path), tokens(40)), decoder_logits(load(path), tokens(40)))


def test_frequency_factors_of_llama3_files_are_used(
    tmp_path: Path, tiny_llama: tuple[Path, LlamaForCausalLM], tokens: Any
) -> None:
    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    path = llama_gguf(tmp_path / "m.gguf", tiny_llama[1], tensors={"rope_freqs.weight": (factors, Kind.F32)})
    decoder = load(path)
    plain = load(tiny_llama[0])
    torch.testing.assert_close(decoder.rope.frequencies * torch.from_numpy(factors), plain.rope.frequencies)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, tiny_llama: tuple[Path, LlamaForCausalLM]) -> None:
    wrong = {"blk.1.ffn_up.weight": (np.zeros((3, 96), np.float32), Kind.F32)}
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_up\.weight has shape \(3, 96\)"):
        load(llama_gguf(tmp_path / "a.gguf", tiny_llama[1], tensors=wrong))
    with pytest.raises(ModelLoadError, match=r"blk\.3\.attn_norm\.weight is missing"):
        load(llama_gguf(tmp_path / "b.gguf", tiny_llama[1], llama__block_count=4))


def test_a_damaged_tensor_is_named(tmp_path: Path, tiny_llama: tuple[Path, LlamaForCausalLM]) -> None:
    up = tiny_llama[1].state_dict()["model.layers.0.mlp.up_proj.weight"].numpy().copy()
    up[-1, 3] = np.nan
    path = llama_gguf(tmp_path / "nan.gguf", tiny_llama[1], tensors={"blk.0.ffn_up.weight": (up, Kind.F32)})
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mlp\.up_proj\.weight holds numbers that are not finite"):
        load(path)


def test_unsupported_things_in_a_gguf_are_refused(tmp_path: Path, tiny_llama: tuple[Path, LlamaForCausalLM]) -> None:
    nothing = {"t": (np.zeros(32, np.float32), Kind.F32)}
    with pytest.raises(UnsupportedModelError, match=r"'gpt2'.*llama, qwen2, qwen3"):
        read_spec(write(tmp_path / "a.gguf", nothing, arch="gpt2"))
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        read_spec(llama_gguf(tmp_path / "b.gguf", tiny_llama[1], llama__expert_count=8))
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        read_spec(llama_gguf(tmp_path / "c.gguf", tiny_llama[1], llama__rope__scaling__type="longrope"))


def test_default_model_is_what_transformers_makes_of_it(hf_smollm2: Any) -> None:
    from pagedlc.models import resolve_model

    torch.set_num_threads(2)
    ids = torch.tensor([1, 4093, 198, 504, 3575, 282, 4649, 314, 253, 2123, 7192, 30, 2, 198, 788, 5345])
    with torch.no_grad():
        expected = hf_smollm2(ids[None]).logits[0]
    found = decoder_logits(load(resolve_model("smollm2").path), ids)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_default_model_in_int8_keeps_its_opinion() -> None:
    from pagedlc.models import resolve_model

    torch.set_num_threads(2)
    path = resolve_model("smollm2").path
    ids = torch.arange(1000, 1040)
    exact, rounded = (decoder_logits(load(path, kind), ids).log_softmax(-1) for kind in (None, "int8"))
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert 0.0 < divergence.mean() < 0.03

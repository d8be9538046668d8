"""A weight that is no number is found while the model loads, and the error names its tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedlc import LLM, ModelLoadError
from pagedlc_engine.model import ModelSpec, read_spec
from pagedlc_engine.model.loaders.base import WeightSource, tensor_shapes
from pagedlc_engine.model.loaders.checked import CheckedWeights
from tests.engine.tiny_models import make_tiny_model
from tests.model.checkpoints import write_checkpoint

#: So that the compiled step takes it, too.
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
LAYER = "model.layers.1."
TENSORS = [
    "model.embed_tokens.weight",
    LAYER + "input_layernorm.weight",
    LAYER + "self_attn.k_proj.weight",
    LAYER + "mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def damaged(folder: Path, dtype: torch.dtype, tensor: str, value: float) -> str:
    path = make_tiny_model(folder / "tiny", **SIZES)
    write_checkpoint(path, read_spec(path, "dummy"), dtype, 2)
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        if tensor in weights:
            weights[tensor].view(-1)[-7] = value
            save_file(weights, file)
    return str(path)


@pytest.mark.parametrize("quantization", ["auto", "int8", "fp16", None])
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_damaged_tensor_is_named_whatever_it_is_made_into(
    tmp_path: Path, tensor: str, quantization: str | None
) -> None:
    llm = LLM(damaged(tmp_path, torch.float32, tensor, float("nan")), quantization=quantization, num_blocks=20)
    with pytest.raises(ModelLoadError, match=f"tensor {tensor} holds numbers that are not finite"):
        llm.load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_in_files_of_every_type(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    tensor = LAYER + "mlp.gate_proj.weight"
    with pytest.raises(ModelLoadError, match=tensor):
        LLM(damaged(tmp_path, dtype, tensor, value), num_blocks=20).load()


def test_the_largest_numbers_of_a_type_are_numbers(tmp_path: Path) -> None:
    largest = torch.finfo(torch.bfloat16).max
    with LLM(damaged(tmp_path, torch.bfloat16, LAYER + "mlp.up_proj.weight", largest), num_blocks=20) as llm:
        llm.load()


class Ones(WeightSource):
    """Every number is one."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = tensor_shapes(spec)

    def get(self, name: str) -> torch.Tensor:
        return torch.ones(self._shapes[name])


def test_what_is_read_to_its_place_is_looked_at_in_the_end(tmp_path: Path) -> None:
    spec = read_spec(make_tiny_model(tmp_path / "tiny"), "dummy")
    source = CheckedWeights(Ones(spec))
    out: dict[str, Any] = {name: torch.empty(tensor_shapes(spec)[name]) for name in TENSORS}
    for name in TENSORS:
        source.read_into(name, out[name])
    source.check()
    source.read_into(TENSORS[0], out[TENSORS[0]])
    source._source.get = lambda name: torch.full(tensor_shapes(spec)[name], 1e6)  # type: ignore[method-assign]
    source.read_into(TENSORS[1], torch.empty(tensor_shapes(spec)[TENSORS[1]], dtype=torch.float16))
    with pytest.raises(ModelLoadError, match=rf"{TENSORS[1]}.*infinite as torch.float16.*option dtype"):
        source.check()

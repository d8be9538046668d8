"""Weights go from the files to a GPU in pieces, several at once; the CPU's way gives the same numbers."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pagedlc_engine.errors import ModelLoadError
from pagedlc_engine.model import load_model, read_spec
from pagedlc_engine.model.decoder import Decoder
from pagedlc_engine.model.linear import PlainNormLinear, PlainResidualLinear
from pagedlc_engine.model.loaders.base import tensor_shapes
from pagedlc_engine.model.loaders.safetensors import SafetensorsWeights
from pagedlc_engine.model.loaders.staging import Staging
from tests.engine.tiny_models import make_tiny_model
from tests.model.checkpoints import write_checkpoint

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, shards: int = 3, **changes: object) -> Path:
    path = make_tiny_model(folder / "tiny", **changes)
    write_checkpoint(path, read_spec(path, "dummy"), dtype, shards)
    return path


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("wanted", TYPES)
def test_what_is_read_in_pieces_is_what_is_read_whole(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    path = checkpoint(tmp_path, stored)
    spec = read_spec(path)
    source = SafetensorsWeights(path, spec, CPU)
    source._staging = Staging(CPU, chunk=48)
    shapes = tensor_shapes(spec)
    targets = {name: torch.full(shape, float("nan"), dtype=wanted) for name, shape in shapes.items()}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(source.read_into, targets, targets.values()))
    for name, target in targets.items():
        assert torch.equal(target, source.get(name).to(wanted)), name


def test_tensors_are_read_into_rows_of_a_larger_one(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    source = SafetensorsWeights(path, read_spec(path), CPU)
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    parts = [source.get(name) for name in names]
    joined = torch.empty_like(torch.cat(parts))
    for name, rows in zip(names, joined.chunk(2), strict=True):
        source.read_into(name, rows)
    assert torch.equal(joined, torch.cat(parts))


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, shards=1)
    source = SafetensorsWeights(path, read_spec(path), CPU)
    (file,) = path.glob("*.safetensors")
    target = torch.empty(tensor_shapes(read_spec(path))["model.embed_tokens.weight"])
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match=r"ended .* bytes early while it was read"):
        source.read_into("model.embed_tokens.weight", target)


def test_a_header_whose_bytes_are_not_its_shapes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, shards=1)
    (file,) = path.glob("*.safetensors")
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"][0] += 4
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(ModelLoadError, match=r"damaged: the tensor model\.norm\.weight has .* bytes"):
        read_spec(path)


def weights(decoder: Decoder) -> list[torch.Tensor]:
    found = [decoder.embedding, decoder.norm]
    for layer in decoder.layers:
        for part in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(part, PlainNormLinear | PlainResidualLinear)
            found.append(part.weight)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_gpu_gets_the_weights_and_little_else(tmp_path: Path, load_format: str) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 32000}
    path = checkpoint(tmp_path, torch.bfloat16, **wide)
    spec = read_spec(path, load_format)
    device = torch.device("cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    there = load_model(path, spec, load_format, torch.bfloat16, device, None, 1)
    taken, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert peak <= 1.15 * taken  # the query and key rows of some layers are there twice, for a moment
    if load_format == "safetensors":
        here = load_model(path, spec, load_format, torch.bfloat16, CPU, None, 1)
        for expected, found in zip(weights(here), weights(there), strict=True):
            assert torch.equal(found.cpu(), expected)

"""Sharded checkpoints of random weights, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pagedlc_engine.model import ModelSpec
from pagedlc_engine.model.loaders.base import tensor_shapes


def write_checkpoint(folder: Path, spec: ModelSpec, dtype: torch.dtype, shards: int) -> None:
    """Weights for a folder that has a ``config.json``; neighbours in the model lie in different files."""
    generator = torch.Generator().manual_seed(3)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for number, (name, shape) in enumerate(tensor_shapes(spec).items()):
        files[number % shards][name] = torch.randn(shape, generator=generator).to(dtype)
    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

"""Random weights, for benchmarks and tests without files."""

from __future__ import annotations

import zlib

import torch

from pagedlc_engine.model.loaders.base import WeightSource, tensor_shapes
from pagedlc_engine.model.spec import ModelSpec

__all__ = ["DummyWeights"]

_STD = 0.02


class DummyWeights(WeightSource):
    """Normal weights of standard deviation 0.02, biases of zero and norms of one.

    Args:
        spec: The model.
        seed: The same seed gives the same weights, whatever order they are asked for in.
        dtype: Type of the tensors.
        device: Where they are made; a GPU makes large models in a moment.
    """

    def __init__(self, spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = tensor_shapes(spec)
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def get(self, name: str) -> torch.Tensor:
        """The tensor ``name``."""
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """See :class:`WeightSource`; ``out`` is of the type and on the device given above."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            # torch's CPU generator looks at 32 bits of its seed only.
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            out.normal_(0.0, _STD, generator=generator)

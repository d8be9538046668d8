"""The compiled library: its functions, and the structures of ``src/model.h``."""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from typing import Any, ClassVar

import torch

from pagedlc_engine.native.compiler import BuildError, build

__all__ = ["Layer", "Library", "Model", "Step", "address", "load_library"]

logger = logging.getLogger(__name__)


class Layer(ctypes.Structure):
    """Addresses of one layer's weights."""

    _fields_: ClassVar = [
        ("attention_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", c_void_p),
        ("output_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("window", c_int64),
    ]


class Model(ctypes.Structure):
    """Sizes and weights of a model."""

    _fields_: ClassVar = [
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("vocab_size", c_int64),
        ("num_layers", c_int64),
        ("eps", c_float),
        ("rope_amplitude", c_float),
        ("rope_frequencies", c_void_p),
        ("norm", c_void_p),
        ("head", c_void_p),
        ("layers", POINTER(Layer)),
    ]


class Step(ctypes.Structure):
    """The tokens of a step."""

    _fields_: ClassVar = [
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("block_size", c_int64),
        ("max_blocks", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("first_tokens", c_void_p),
        ("block_tables", c_void_p),
        ("caches", c_void_p),
        ("stream", c_void_p),
        ("scratch", c_void_p),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "pagedlc_is_fast": (c_int, []),
    "pagedlc_team": (c_void_p, [c_int, c_int64]),
    "pagedlc_dismiss": (None, [c_void_p]),
    "pagedlc_packed_bytes": (c_int64, [c_int64, c_int64]),
    "pagedlc_pack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "pagedlc_scratch_bytes": (c_int64, [POINTER(Model), c_int64]),
    "pagedlc_forward": (None, [c_void_p, POINTER(Model), POINTER(Step)]),
    "pagedlc_logits": (None, [c_void_p, POINTER(Model), c_void_p, c_int64, c_void_p, c_void_p]),
}


class Library:
    """The functions of ``src/step.cpp``. A call lets other Python threads run.

    Args:
        path: The shared library.

    Raises:
        OSError: It cannot be loaded.
        AttributeError: It is another library.
    """

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        #: Whether this CPU has instructions for products of 8-bit integers that the code knows.
        self.is_fast = bool(loaded.pagedlc_is_fast())
        self.team: Any = loaded.pagedlc_team
        self.dismiss: Any = loaded.pagedlc_dismiss
        self.packed_bytes: Any = loaded.pagedlc_packed_bytes
        self.pack: Any = loaded.pagedlc_pack
        self.scratch_bytes: Any = loaded.pagedlc_scratch_bytes
        self.forward: Any = loaded.pagedlc_forward
        self.logits: Any = loaded.pagedlc_logits


@functools.cache
def load_library() -> Library | None:
    """The library for this machine; ``None`` where it cannot be built, for which the log has the reason (once)."""
    try:
        return Library(str(build()))
    except (BuildError, OSError, AttributeError) as error:
        logger.warning("The CPU step could not be compiled, torch computes instead, several times slower: %s.", error)
        return None


def address(tensor: torch.Tensor | None) -> int | None:
    """Where the numbers of a contiguous tensor are."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()

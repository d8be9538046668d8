"""The decoder whose whole step is one call of compiled code, in 8-bit integers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from ctypes import addressof, byref
from typing import Any

import torch
from torch.nn import functional

from pagedlc_engine.model.loaders.base import WeightSource
from pagedlc_engine.model.rope import inverse_frequencies
from pagedlc_engine.model.spec import ModelSpec
from pagedlc_engine.native.attention import NativeStep
from pagedlc_engine.native.compiler import GROUP, MOST_HEAD_DIM, MOST_QUERIES
from pagedlc_engine.native.library import Library, Model, Step, address
from pagedlc_engine.native.weights import pack_model

__all__ = ["NativeDecoder", "unsupported"]


def unsupported(spec: ModelSpec) -> str | None:
    """Why the native step cannot run a model; ``None`` when it can."""
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(spec, name) % GROUP:
            return f"the model's {name} is {getattr(spec, name)}, not a multiple of {GROUP}"
    if spec.head_dim > MOST_HEAD_DIM:
        return f"the model's head_dim is {spec.head_dim}, more than {MOST_HEAD_DIM}"
    if spec.num_heads // spec.num_kv_heads > MOST_QUERIES:
        return f"more than {MOST_QUERIES} query heads share a key head"
    return None


class NativeDecoder:
    """As :class:`pagedlc_engine.model.decoder.Decoder`, over the cache of a ``NativeAttention``.

    Weights and activations are 8-bit integers with one scale per 32 of them. Every number of a token is computed in
    an order that depends on nothing but the token's own sequence: neither on the other tokens of the step, nor on
    where its prompt was cut, nor on the number of threads. So the same request gives the same bits.

    Args:
        spec: The model; see :func:`unsupported`.
        source: Its weights.
        library: The compiled code.
        threads: How many compute.
        max_model_len: Longest sequence in tokens.
        progress: Called with (parts done, parts in all) while weights are read.

    Raises:
        OutOfMemoryError: There is no memory for the weights.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        library: Library,
        threads: int,
        max_model_len: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec = spec
        self._library = library
        self._team = library.team(threads, spec.num_layers)
        # Not at the interpreter's exit: another thread may still be in a step then.
        weakref.finalize(self, _dismiss, library, self._team, os.getpid()).atexit = False
        self._weights = pack_model(source, spec, library, self._team, progress)
        frequencies, amplitude = inverse_frequencies(spec.rope, spec.head_dim, max_model_len)
        self._frequencies = frequencies.contiguous()
        self._model = Model(
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.vocab_size,
            spec.num_layers,
            spec.rms_norm_eps,
            amplitude,
            address(self._frequencies),
            self._weights.norm,
            self._weights.head,
            self._weights.layers,
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: NativeStep) -> torch.Tensor:
        """Hidden vectors after the last norm.

        Args:
            token_ids: ``[T]`` int64, the tokens of all requests one after the other.
            positions: ``[T]`` int64, each token's place in its own request.
            attention: What ``NativeAttention.plan`` made of the step.

        Returns:
            ``[T, hidden_size]`` float32.
        """
        stream = functional.embedding(token_ids, self._weights.embedding)
        step = Step(
            len(token_ids),
            len(attention.block_tables),
            attention.backend.block_size,
            attention.block_tables.shape[1],
            address(positions),
            attention.slots.ctypes.data,
            attention.first_tokens.ctypes.data,
            attention.block_tables.ctypes.data,
            addressof(attention.backend.addresses),
            address(stream),
            self._scratch_for(len(token_ids)),
        )
        self._library.forward(self._team, byref(self._model), byref(step))
        return stream

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[S, vocab_size]`` float32 for hidden vectors ``[S, hidden_size]``."""
        hidden = hidden.contiguous()
        rows = len(hidden)
        logits = torch.empty(rows, self.spec.vocab_size)
        scratch = self._scratch_for(rows)
        self._library.logits(self._team, byref(self._model), address(hidden), rows, scratch, address(logits))
        return logits

    def _scratch_for(self, rows: int) -> int:
        size = self._library.scratch_bytes(byref(self._model), rows)
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()


def _dismiss(library: Library, team: Any, owner: int) -> None:
    """End the threads; a forked process has none of them to wait for."""
    if os.getpid() == owner:
        library.dismiss(team)

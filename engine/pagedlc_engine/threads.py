"""How many CPU threads a step uses.

A step of few tokens is made of products too small to share: on two cores, waiting for each other can cost a third of
the speed. How many threads pay depends on the model and the machine, so it is tried out when the engine is built.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagedlc_engine.model.decoder import Decoder

__all__ = ["FEW_TOKENS", "StepThreads", "usual_threads"]

#: Steps of up to so many tokens use the number of threads that was quickest for :data:`_TRIED_TOKENS` tokens.
FEW_TOKENS = 16
_TRIED_TOKENS = 8
_REPEATS = 3
#: What an engine had before its last small step.
_usual = 1


def usual_threads() -> int:
    """torch's CPU threads, without what small steps of other engines make of them.

    Every thread has its own number; one that is new to torch begins with the last that was set anywhere.
    """
    current = torch.get_num_threads()
    return _usual if current == 1 else current


class StepThreads:
    """Threads for small steps and for large ones; does nothing on other devices than the CPU.

    Args:
        decoder: The model; ``None`` when torch has so little to do in small steps that threads cannot pay.
    """

    def __init__(self, decoder: Decoder | None) -> None:
        self._on_cpu = decoder is None or decoder.device.type == "cpu"
        self._many = usual_threads() if self._on_cpu else 1
        self._few = 1
        if decoder is not None and self._many > 1:
            self._few = min((1, self._many), key=lambda threads: _seconds(decoder, threads))

    @contextmanager
    def for_step(self, num_tokens: int) -> Iterator[None]:
        """Use the right number of threads for a step of ``num_tokens`` tokens."""
        if self._few == self._many or num_tokens > FEW_TOKENS:
            if self._on_cpu and torch.get_num_threads() != self._many:
                torch.set_num_threads(self._many)
            yield
            return
        with _threads(self._few, self._many):
            yield


@contextmanager
def _threads(number: int, before: int) -> Iterator[None]:
    global _usual
    _usual = before
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(decoder: Decoder, threads: int) -> float:
    """The least time of a few small steps without attention."""
    tokens = torch.zeros(_TRIED_TOKENS, dtype=torch.int64)
    best = float("inf")
    with _threads(threads, usual_threads()):
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            decoder.compute_logits(decoder.forward(tokens, tokens, _no_attention))
            best = min(best, time.perf_counter() - start)
    return best


def _no_attention(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.reshape(len(query), -1)

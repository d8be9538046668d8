"""How many CPU threads a step uses.

A step of few tokens is made of products too small to share: on two cores, waiting for each other can cost a third of
the speed. How many threads pay depends on the model and the machine, so it is tried out when the engine is built.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import torch

from pagedlc_engine.model.decoder import Decoder

__all__ = ["FEW_TOKENS", "StepThreads", "usual_threads"]

#: Steps of up to so many tokens use the number of threads that was quickest for :data:`_TRIED_TOKENS` tokens.
FEW_TOKENS = 16
_TRIED_TOKENS = 8
_REPEATS = 3
#: What was usual when a thread was last given another number.
_usual = 1


def usual_threads() -> int:
    """torch's CPU threads, without what small steps of an engine make of them in the thread that runs it."""
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

    def use_for(self, num_tokens: int) -> None:
        """Give this thread, which runs the engine, the right number for a step of ``num_tokens`` tokens, to keep."""
        wanted = self._few if num_tokens <= FEW_TOKENS else self._many
        if self._on_cpu and torch.get_num_threads() != wanted:
            _set_here(wanted, self._many)


def _set_here(number: int, usual: int) -> None:
    """torch's CPU threads in this thread only.

    Every thread has its own number, but one that is new to torch begins with the last that was set anywhere. So a
    thread that ends at once sets the usual one again: the program's next pool must not be born with an engine's number.
    """
    global _usual
    _usual = usual
    torch.set_num_threads(number)
    if number != usual:
        last = threading.Thread(target=torch.set_num_threads, args=(usual,), name="pagedlc-threads")
        with suppress(RuntimeError):  # the interpreter is ending, and nobody is born any more
            last.start()
            last.join()


def _seconds(decoder: Decoder, threads: int) -> float:
    """The least time of a few small steps without attention."""
    tokens = torch.zeros(_TRIED_TOKENS, dtype=torch.int64)
    best = float("inf")
    usual = usual_threads()
    _set_here(threads, usual)
    try:
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            decoder.compute_logits(decoder.forward(tokens, tokens, _no_attention))
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(usual)
    return best


def _no_attention(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.reshape(len(query), -1)

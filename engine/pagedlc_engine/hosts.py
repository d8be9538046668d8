"""Where an engine runs: in a thread of the user's process, or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

import pagedlc_engine.forks  # noqa: F401
from pagedlc_engine.config import EngineConfig
from pagedlc_engine.engine import Progress, build_engine
from pagedlc_engine.errors import ConfigError
from pagedlc_engine.grammar import TokenVocabulary
from pagedlc_engine.loop import EngineThread
from pagedlc_engine.messages import Command, Deliver, EngineInfo
from pagedlc_engine.model import ModelSpec

__all__ = ["EngineHost", "start_host"]


class EngineHost(Protocol):
    """A loaded engine somewhere, for one :class:`~pagedlc_engine.client.EngineClient`."""

    @property
    def info(self) -> EngineInfo:
        """What the client must know."""
        ...

    def start(self, deliver: Deliver) -> None:
        """Begin to step; to be called once, before the first command.

        Args:
            deliver: Takes outputs, on a thread of the host's.
        """
        ...

    def send(self, command: Command) -> None:
        """Hand over a command; it takes effect before the next step. Never waits."""
        ...

    def close(self, timeout: float | None = None) -> None:
        """End the engine, free its memory and wait for that; no output comes afterwards. May be called again."""
        ...


def start_host(
    config: EngineConfig,
    spec: ModelSpec,
    progress: Progress | None = None,
    vocabulary: Callable[[], TokenVocabulary] | None = None,
) -> EngineHost:
    """Load an engine where ``config.engine_host`` says; arguments and errors are those of :func:`build_engine`.

    Raises:
        ConfigError: As there, or CUDA is lost to this process.
        EngineDeadError: The engine's process ended while it loaded.
    """
    if config.engine_host == "process":
        from pagedlc_engine.process.host import EngineProcess

        return EngineProcess(config, spec, progress, vocabulary)
    _check_cuda(config.device)
    return EngineThread(build_engine(config, spec, progress, vocabulary))


def _check_cuda(device: str) -> None:
    if device != "cpu" and torch.cuda._is_in_bad_fork():
        raise ConfigError(
            "This process was forked from one that had used CUDA, which cannot be used here any more. Start worker "
            "processes with 'spawn', or use engine_host='process' or device='cpu'."
        )

"""One engine per model and options in a process, however many objects use it."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Any

from pagedlc.llm import LLM

__all__ = ["Registry", "shared_llm"]

logger = logging.getLogger(__name__)


class Registry:
    """LLMs in use, by model and options. It keeps none alive: that is for whoever uses one."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Begin anew, as a forked process must: another thread may have held the lock, or been loading an LLM."""
        self._lock = threading.Lock()
        self._llms: weakref.WeakValueDictionary[tuple[Any, ...], LLM] = weakref.WeakValueDictionary()

    def get(self, model: str, **options: Any) -> LLM:
        """The LLM with this model and options; made if nobody holds one.

        Hold the result for as long as you use it. When the last holder lets go, the engine stops and its memory
        is freed. A ``with`` block leaves it open; its ``close()`` closes it for everybody. Options are those of
        :class:`pagedlc.LLM`.

        Raises:
            ConfigError, ModelLoadError: As :class:`pagedlc.LLM` raises.
        """
        llm = LLM(model, **options)
        llm.shared = True
        key = llm.identity
        with self._lock:
            found = self._llms.get(key)
            if found is not None and found.usable:
                return found
            others = [other for other in self._llms.values() if other.usable and other.config.model == llm.config.model]
            self._llms[key] = llm
        if others:
            _tell_apart(llm, others)
        return llm


def _tell_apart(llm: LLM, others: list[LLM]) -> None:
    """Say what the options differ in from the most similar ones."""
    pairs = [zip(llm.identity, other.identity, strict=True) for other in others]
    differences = [
        [f"{name}={value!r}, not {earlier!r}" for (name, value), (_, earlier) in pair if value != earlier]
        for pair in pairs
    ]
    differing = min(differences, key=len)
    logger.warning(
        "%s is used with other options a second time in this process (%s): that takes another engine, with weights and "
        "KV cache of its own.",
        llm.model_name,
        "; ".join(differing),
    )


_registry = Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.forget_all)


def shared_llm(model: str, **options: Any) -> LLM:
    """:meth:`Registry.get` of this process's registry."""
    return _registry.get(model, **options)

"""The run that an answer is given in. LangChain does not tell the methods that stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.uuid import uuid7

from langchain_pagedlc._batching import batch_name

__all__ = ["Run", "run_of", "running_in", "with_run_id"]

#: Ids of a run and of the run it is part of, and the name of its batch.
Run = tuple[uuid.UUID | str | None, ...]

_current: ContextVar[Run] = ContextVar("pagedlc_langchain_run", default=())


@contextmanager
def running_in(run: Run) -> Iterator[None]:
    """Answers that begin in this context belong to this run."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def run_of(manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> Run:
    """The run that an answer is about to begin in, as far as it is known."""
    return _current.get() if manager is None else (manager.run_id, manager.parent_run_id, batch_name())


def with_run_id(config: RunnableConfig | None) -> tuple[RunnableConfig, Run]:
    """A config that says the id of its run, and the run it will be."""
    full = ensure_config(config)
    run_id = full.get("run_id") or uuid7()
    callbacks: Any = full.get("callbacks")
    return RunnableConfig(**{**full, "run_id": run_id}), (run_id, getattr(callbacks, "parent_run_id", None))

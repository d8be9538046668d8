"""How many requests of a batch are on their way at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

__all__ = ["MAX_THREADS", "admit_all"]

#: Threads that wait for answers in one synchronous batch. Far more than an engine runs at once, so that none
#: is ever idle for want of a request, and few enough for any process.
MAX_THREADS: Final = 1024


def admit_all(config: RunnableConfig | Sequence[RunnableConfig] | None, count: int) -> list[RunnableConfig]:
    """Configs for a batch of ``count`` inputs that are all handed to the engine at once.

    LangChain's own default is a thread pool sized by the number of CPUs, which would keep the engine waiting.
    A ``max_concurrency`` the user sets stays.
    """
    configs = get_config_list(config, count)
    if configs[0].get("max_concurrency") is not None:
        return configs
    return [RunnableConfig(**{**each, "max_concurrency": min(count, MAX_THREADS)}) for each in configs]

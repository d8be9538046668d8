"""Calls of a model that are waited for together: how many are on their way at once, and what ends them all."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, as_completed, wait
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list

__all__ = ["MAX_THREADS", "Batch", "admit_all", "batch_name", "check_wanted", "invoke_all", "invoke_as_completed"]

#: Threads that wait for answers in one synchronous batch. Far more than an engine runs at once, so that none
#: is ever idle for want of a request, and few enough for any process.
MAX_THREADS: Final = 1024

#: How long to wait for calls that were interrupted before looking for some that were not, in seconds.
_PAUSE: Final = 0.05


def admit_all(config: RunnableConfig | Sequence[RunnableConfig] | None, count: int) -> list[RunnableConfig]:
    """Configs for a batch of ``count`` inputs that are all handed to the engine at once.

    LangChain's own default is a thread pool sized by the number of CPUs, which would keep the engine waiting.
    A ``max_concurrency`` the user sets stays.
    """
    configs = get_config_list(config, count)
    if configs[0].get("max_concurrency") is not None:
        return configs
    return [RunnableConfig(**{**each, "max_concurrency": min(count, MAX_THREADS)}) for each in configs]


class Batch:
    """Threads that wait for the answers of a batch; as a context, which ends when all calls have ended.

    When it is left by what is no error of a call (Ctrl-C, a generator that is closed), nobody wants the answers any
    more: their generation ends, too. LangChain's executor would wait for all of them.

    Args:
        max_threads: How many calls run at once.
        interrupt: Ends the answers of a name within a step; returns how many there are.

    Attributes:
        name: Name of all answers of the batch, for ``interrupt``.
        given_up: Whether nobody wants the answers any more.
    """

    def __init__(self, max_threads: int | None, interrupt: Callable[[str], int]) -> None:
        self.name = uuid.uuid4().hex
        self.given_up = False
        self._interrupt = interrupt
        self._threads = ContextThreadPoolExecutor(max_threads)
        self._futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a thread call ``function``."""
        future = self._threads.submit(self._call, function, *args, **kwargs)
        self._futures.append(future)
        return future

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The thread's context is a copy made for this call: nothing has to be put back.
        _current.set(self)
        return function(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None or isinstance(error, Exception):
                self._threads.shutdown(wait=False, cancel_futures=error is not None)
                wait(self._running())
                return
        except BaseException:
            self._give_up()
            raise
        self._give_up()

    def _give_up(self) -> None:
        self.given_up = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._interrupt(self.name)
        # Calls on their way to the engine have no name there yet. Those that have one need not be waited for: they may
        # take long to notice, such as when the weights are being loaded.
        while (running := wait(self._running(), _PAUSE).not_done) and self._interrupt(self.name) < len(running):
            pass

    def _running(self) -> list[Future[Any]]:
        return [future for future in self._futures if not future.done()]


_current: ContextVar[Batch | None] = ContextVar("pagedlc_langchain_batch", default=None)


def batch_name() -> str | None:
    """Name of the batch that the answer about to begin belongs to, for ``interrupt``."""
    batch = _current.get()
    return None if batch is None else batch.name


def check_wanted() -> None:
    """See whether anybody wants the answer that has just ended; otherwise it is cut off, and nothing to keep.

    Raises:
        CancelledError: Its batch was given up.
    """
    batch = _current.get()
    if batch is not None and batch.given_up:
        raise CancelledError("The batch that this call belongs to was given up.")


def invoke_all(
    invoke: Callable[..., Any],
    inputs: Sequence[Any],
    configs: Sequence[RunnableConfig],
    return_exceptions: bool,
    interrupt: Callable[[str], int],
) -> list[Any]:
    """``Runnable.batch`` with a :class:`Batch`.

    Args:
        invoke: Called with an input and its config.
        inputs: The inputs.
        configs: One for each, as :func:`admit_all` makes them.
        return_exceptions: An input's error stands in its place.
        interrupt: As for :class:`Batch`.
    """
    call = _caught(invoke) if return_exceptions else invoke
    if len(inputs) == 1:
        return [call(inputs[0], configs[0])]
    with Batch(configs[0].get("max_concurrency"), interrupt) as batch:
        futures = [batch.submit(call, *pair) for pair in zip(inputs, configs, strict=True)]
        return [future.result() for future in futures]


def invoke_as_completed(
    invoke: Callable[..., Any],
    inputs: Sequence[Any],
    configs: Sequence[RunnableConfig],
    return_exceptions: bool,
    interrupt: Callable[[str], int],
) -> Iterator[tuple[int, Any]]:
    """``Runnable.batch_as_completed`` with a :class:`Batch`; arguments as for :func:`invoke_all`."""
    call = _caught(invoke) if return_exceptions else invoke
    if len(inputs) == 1:
        yield 0, call(inputs[0], configs[0])
        return
    with Batch(configs[0].get("max_concurrency"), interrupt) as batch:
        indices = {batch.submit(call, *pair): index for index, pair in enumerate(zip(inputs, configs, strict=True))}
        for future in as_completed(indices):
            yield indices[future], future.result()


def _caught(invoke: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return invoke(*args)
        except Exception as error:
            return error

    return call

"""The loop that steps an engine, commands in and outputs out, and the thread that runs it in the user's process."""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue

from pagedlc_engine.device import on_device
from pagedlc_engine.engine import Engine, failed_delta
from pagedlc_engine.errors import MAKE_ANEW, EngineDeadError, PagedLCError, without_frames
from pagedlc_engine.messages import (
    Abort,
    Command,
    Configure,
    CountCached,
    Deliver,
    EngineInfo,
    Output,
    ResetPrefixCache,
    Submit,
    WakeUp,
)
from pagedlc_engine.request import Request, TokenDelta

__all__ = ["EngineThread", "Inbox", "describe", "run_loop"]

logger = logging.getLogger(__name__)

#: Commands on their way to a loop; ``None`` ends it.
Inbox = SimpleQueue[Command | None]


class EngineThread:
    """Runs an engine in a daemon thread of this process.

    Args:
        engine: The caller must keep no reference to it: when the thread ends, weights and KV cache go with it.
    """

    def __init__(self, engine: Engine) -> None:
        self.info = describe(engine)
        self._inbox: Inbox = SimpleQueue()
        self._owned = [engine]

    def start(self, deliver: Deliver) -> None:
        """See :class:`~pagedlc_engine.hosts.EngineHost`."""
        self._thread = threading.Thread(
            target=run_loop, args=(self._owned, self._inbox, deliver), name="pagedlc-engine", daemon=True
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        """See :class:`~pagedlc_engine.hosts.EngineHost`."""
        self._inbox.put(command)

    def close(self, timeout: float | None = None) -> None:
        """See :class:`~pagedlc_engine.hosts.EngineHost`."""
        self._inbox.put(None)
        # It never ran if the system had no more threads.
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout)


def describe(engine: Engine) -> EngineInfo:
    """What a client must know of an engine."""
    cache = engine.scheduler.cache
    return EngineInfo(
        max_model_len=engine.scheduler.max_model_len,
        vocab_size=engine.runner.decoder.spec.vocab_size,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        device=engine.runner.device.type,
        stats=engine.stats(),
    )


def run_loop(owned: list[Engine], inbox: Inbox, deliver: Deliver) -> None:
    """Step an engine until told to end, until nobody takes its outputs, or until it fails; then close it.

    Args:
        owned: Holds the engine, and is emptied: whoever started the loop must not keep it alive past its end.
        inbox: Commands; they take effect before the next step.
        deliver: Takes what comes out.
    """
    engine = owned.pop()
    engine.wake = lambda: inbox.put(WakeUp())
    with on_device(engine.runner.device):
        _step_until_told(engine, inbox, deliver)


def _step_until_told(engine: Engine, inbox: Inbox, deliver: Deliver) -> None:
    try:
        while (commands := _receive(inbox, wait=not engine.has_work())) is not None:
            deltas: list[TokenDelta] = []
            replies: dict[int, int] = {}
            for command in commands:
                if isinstance(command, CountCached):
                    replies[command.query_id] = engine.count_cached(command.block_hashes)
                else:
                    deltas += _obey(engine, command)
            if engine.has_work():
                deltas += engine.step()
            if not deliver(Output(deltas, engine.stats(), replies)):
                return
    except Exception as error:
        logger.exception("The engine's loop failed.")
        died = EngineDeadError(f"The engine failed and cannot go on: {type(error).__name__}: {error}\n{MAKE_ANEW}")
        died.__cause__ = without_frames(error)
        deliver(Output([], died=died))
    finally:
        engine.close()


def _receive(inbox: Inbox, wait: bool) -> list[Command] | None:
    """All commands that have come; waits for one if there is nothing else to do; ``None`` to end."""
    commands: list[Command] = []
    while True:
        try:
            command = inbox.get(block=wait and not commands)
        except Empty:
            return commands
        if command is None:
            return None
        commands.append(command)


def _obey(engine: Engine, command: Command) -> list[TokenDelta]:
    if isinstance(command, Submit):
        return _submit(engine, command.request)
    if isinstance(command, Abort):
        return engine.abort(command.request_id, command.index)
    if isinstance(command, Configure):
        engine.scheduler.max_num_seqs = command.max_num_seqs
    elif isinstance(command, ResetPrefixCache):
        engine.reset_prefix_cache()
    return []


def _submit(engine: Engine, request: Request) -> list[TokenDelta]:
    try:
        engine.add(request)
    except Exception as error:
        # Whatever is wrong with a request is its own affair; the others go on.
        known = error if isinstance(error, PagedLCError) else PagedLCError(f"The request cannot be queued: {error!r}")
        return [failed_delta(request, index, known) for index in range(request.params.n)]
    return []

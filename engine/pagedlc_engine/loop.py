"""The thread that steps an engine: commands in, deltas out, as plain messages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from pagedlc_engine.engine import Engine, failed_delta
from pagedlc_engine.errors import EngineDeadError, PagedLCError, without_frames
from pagedlc_engine.request import Request, TokenDelta
from pagedlc_engine.stats import EngineStats

__all__ = [
    "Abort",
    "Command",
    "Configure",
    "CountCached",
    "Deliver",
    "EngineThread",
    "Output",
    "ResetPrefixCache",
    "Submit",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up a request, or one of its answers."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Configure:
    """Change what may change while the engine runs."""

    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached prefixes."""


@dataclass(frozen=True, slots=True)
class CountCached:
    """Ask how many blocks of a chain are cached; the answer comes in ``Output.replies`` under ``query_id``."""

    query_id: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Look again whether there is something to do."""


Command = Submit | Abort | Configure | ResetPrefixCache | CountCached | WakeUp


@dataclass(frozen=True, slots=True)
class Output:
    """What one turn of the loop has to say.

    Args:
        deltas: New tokens.
        stats: A snapshot taken after the step.
        replies: Query id to answer.
        died: Set on the last output of an engine that failed.
    """

    deltas: list[TokenDelta]
    stats: EngineStats
    replies: dict[int, int] = field(default_factory=dict)
    died: EngineDeadError | None = None


#: Takes outputs on the loop's thread; returns False when nobody is there any more to take them.
Deliver = Callable[[Output], bool]


class EngineThread:
    """Runs an engine in a daemon thread of this process.

    The thread owns the engine; when it ends, weights and KV cache go with it.
    """

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=([engine], self._inbox, deliver), name="pagedlc-engine", daemon=True
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        """Hand over a command; it takes effect before the next step."""
        self._inbox.put(command)

    def close(self, timeout: float | None = None) -> None:
        """End the loop after the step that is running, and wait for that."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)


def _run(owned: list[Engine], inbox: SimpleQueue[Command | None], deliver: Deliver) -> None:
    # The thread's own argument tuple would keep the engine alive past its end, hence the list.
    engine = owned.pop()
    engine.wake = lambda: inbox.put(WakeUp())
    stats = engine.stats()
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
            stats = engine.stats()
            if not deliver(Output(deltas, stats, replies)):
                return
    except Exception as error:
        logger.exception("The engine's loop failed.")
        died = EngineDeadError(f"The engine failed and cannot go on: {type(error).__name__}: {error}")
        died.__cause__ = without_frames(error)
        deliver(Output([], stats, died=died))
    finally:
        engine.close()


def _receive(inbox: SimpleQueue[Command | None], wait: bool) -> list[Command] | None:
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

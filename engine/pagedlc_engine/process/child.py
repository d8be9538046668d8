"""The engine's side of a process host: load, say so, and step until the other side is gone."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

import torch

from pagedlc_engine import heap
from pagedlc_engine.engine import Engine, build_engine
from pagedlc_engine.errors import PagedLCError, portable
from pagedlc_engine.grammar import TokenVocabulary
from pagedlc_engine.loop import Inbox, describe, run_loop
from pagedlc_engine.messages import Output
from pagedlc_engine.process.channel import Channel
from pagedlc_engine.process.wire import LoadFailed, Loading, Ready, Setup, Vocabulary, pack_outputs

__all__ = ["serve"]

_FLUSH_SECONDS = 10.0
#: A busy engine that has nothing else to say sends its numbers this often.
_STATS_SECONDS = 0.05


def serve(connection: socket.socket) -> None:
    """Be the engine's process; does not return."""
    channel = Channel(connection, encode=pack_outputs)
    messages = iter(channel)
    setup = next(messages, None)
    if setup is not None:
        _serve(setup, channel, messages)
        channel.flush(_FLUSH_SECONDS)
    # Nothing is left to tidy up that the system would not, and libraries' exit handlers may hang.
    os._exit(0)


def _serve(setup: Setup, channel: Channel, messages: Iterator[Any]) -> None:
    inbox: Inbox = SimpleQueue()
    vocabulary: Future[Vocabulary] = Future()
    threading.Thread(target=_receive, args=(messages, inbox, vocabulary), name="pagedlc-receiver", daemon=True).start()
    _forward_logs(channel, setup.log_level)
    torch.set_num_threads(setup.num_threads)
    try:
        owned = [_build(setup, channel, vocabulary)]
    except Exception as error:
        channel.send(LoadFailed(_load_error(error)))
        return
    heap.set_aside(channel)
    channel.send(Ready(describe(owned[0])))
    run_loop(owned, inbox, _Outlet(channel))


def _build(setup: Setup, channel: Channel, vocabulary: Future[Vocabulary]) -> Engine:
    def make_vocabulary() -> TokenVocabulary:
        return vocabulary.result().unpack()

    return build_engine(
        setup.config, setup.spec, lambda done, total: channel.send(Loading(done, total)), make_vocabulary
    )


def _load_error(error: Exception) -> PagedLCError:
    if isinstance(error, PagedLCError):
        return portable(error)
    made = PagedLCError(f"The engine could not be built: {type(error).__name__}: {error}")
    made.__cause__ = error
    return portable(made)


def _receive(messages: Iterator[Any], inbox: Inbox, vocabulary: Future[Vocabulary]) -> None:
    try:
        for message in messages:
            if isinstance(message, Vocabulary):
                vocabulary.set_result(message)
            else:
                inbox.put(message)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    # The parent has gone, or wants no more of this engine, whatever it is doing.
    os._exit(0)


class _Outlet:
    """Sends outputs, but not one a step only to say how many steps there were."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sent = 0.0

    def __call__(self, output: Output) -> bool:
        now = time.monotonic()
        if output.deltas or output.replies or output.died or _idle(output) or now >= self._sent + _STATS_SECONDS:
            self._sent = now
            self._channel.send(output)
        return True


def _idle(output: Output) -> bool:
    stats = output.stats
    return stats is not None and stats.num_running == stats.num_waiting == 0


class _LogForwarder(QueueHandler):
    """Sends log records to the user's process."""

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.send(record)  # type: ignore[attr-defined]


def _forward_logs(channel: Channel, level: int) -> None:
    logging.captureWarnings(True)
    logging.basicConfig(handlers=[_LogForwarder(channel)])  # type: ignore[arg-type]
    logging.getLogger("pagedlc_engine").setLevel(level)

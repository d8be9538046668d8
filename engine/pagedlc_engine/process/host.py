"""The user's side of an engine in a process of its own."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from queue import SimpleQueue
from typing import IO, Any

from pagedlc_engine.config import EngineConfig
from pagedlc_engine.device import with_current_gpu
from pagedlc_engine.engine import Progress
from pagedlc_engine.errors import MAKE_ANEW, ConfigError, EngineDeadError, PagedLCError
from pagedlc_engine.messages import Command, Deliver, EngineInfo, Output, Submit
from pagedlc_engine.model import ModelSpec
from pagedlc_engine.process.channel import Channel
from pagedlc_engine.process.wire import (
    LoadFailed,
    Loading,
    MakeVocabulary,
    Ready,
    Setup,
    Vocabulary,
    dump_commands,
    pack_commands,
    unpack_outputs,
)
from pagedlc_engine.threads import usual_threads

__all__ = ["EngineProcess"]

logger = logging.getLogger(__name__)

#: The process's program.
_BEGIN = """
import sys
descriptor, parent, *sys.path = sys.argv[1:]
from pagedlc_engine.process.start import main
main(int(descriptor), int(parent))
"""
_EXIT_SECONDS = 5.0
_SHOWN_LINES = 60
_SHOWN_BYTES = 8000

_News = Loading | Ready | LoadFailed


class EngineProcess:
    """Runs an engine in a child process, which loads it and ends with this one.

    One thread here starts the process, reads what it says, and sees it to its end.

    Args:
        config: The engine's options.
        spec: The model's.
        progress: Told while weights load.
        vocabulary: Sent to the process, pickled, before the first request with ``structured_outputs``.

    Raises:
        EngineDeadError: The process ended while it loaded.
        PagedLCError: What :func:`~pagedlc_engine.engine.build_engine` raised there.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        progress: Progress | None = None,
        vocabulary: MakeVocabulary | None = None,
    ) -> None:
        if not sys.executable:
            raise ConfigError("engine_host='process' needs to know where Python is; use engine_host='thread'.")
        self._vocabulary = vocabulary
        self._owner = os.getpid()
        self._closing = False
        self._news: SimpleQueue[_News] = SimpleQueue()
        self._deliver: Deliver = lambda output: True
        self._death: Output | None = None
        ours, theirs = (_above_standard_streams(end) for end in socket.socketpair())
        self._channel = Channel(ours, encode=pack_commands, decode=unpack_outputs, dump=dump_commands)
        level = logging.getLogger("pagedlc_engine").getEffectiveLevel()
        self._channel.send(Setup(with_current_gpu(config), spec, usual_threads(), level))
        self._thread = threading.Thread(target=self._run, args=(theirs,), name="pagedlc-engine", daemon=True)
        self._thread.start()
        try:
            self.info = self._wait_until_ready(progress)
        except BaseException:
            self.close()
            raise

    def start(self, deliver: Deliver) -> None:
        """See :class:`~pagedlc_engine.hosts.EngineHost`."""
        self._deliver = deliver
        if self._death is not None:  # it was loaded, and ended before anybody listened
            deliver(self._death)

    def send(self, command: Command) -> None:
        """See :class:`~pagedlc_engine.hosts.EngineHost`."""
        if os.getpid() != self._owner:  # a fork gives up its copies of this process's requests
            return
        if isinstance(command, Submit) and command.request.params.structured_outputs and self._vocabulary:
            self._channel.send(Vocabulary(self._vocabulary))
            self._vocabulary = None
        self._channel.send(command)

    def close(self, timeout: float | None = None) -> None:
        """See :class:`~pagedlc_engine.hosts.EngineHost`."""
        if os.getpid() != self._owner:
            return
        self._closing = True
        self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _wait_until_ready(self, progress: Progress | None) -> EngineInfo:
        while True:
            news = self._news.get()
            if isinstance(news, Ready):
                return news.info
            if isinstance(news, LoadFailed):
                raise news.error
            if progress is not None:
                progress(news.done, news.total)

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self, theirs: socket.socket) -> None:
        with ExitStack() as files:
            try:
                with theirs:
                    output = files.enter_context(tempfile.TemporaryFile())
                    process = _spawn(theirs.fileno(), output)
            except OSError as error:
                problem = PagedLCError(f"The engine's process cannot be started ({error}); use engine_host='thread'.")
                self._news.put(LoadFailed(problem))
                return
            try:
                for message in self._channel:
                    self._take(message)
            finally:
                self._channel.close()
                how = _end(process)
                if not self._closing:
                    self._report_death(how, output)

    def _take(self, message: Any) -> None:
        if isinstance(message, Output):
            if not self._deliver(message):
                self._closing = True
                self._channel.close()
        elif isinstance(message, logging.LogRecord):
            target = logging.getLogger(message.name)
            if target.isEnabledFor(message.levelno):
                target.handle(message)
        else:
            self._news.put(message)

    def _report_death(self, how: str, output: IO[bytes]) -> None:
        words = _last_words(output)
        self._news.put(LoadFailed(EngineDeadError(f"The engine's process {how} while it loaded.{words}")))
        self._death = Output([], died=EngineDeadError(f"The engine's process {how}. {MAKE_ANEW}{words}"))
        self._deliver(self._death)


def _above_standard_streams(end: socket.socket) -> socket.socket:
    """In a program that has closed its standard streams, a new descriptor takes the place of one of them."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))


def _spawn(descriptor: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process with this one's modules and environment, away from the terminal's signals.

    Args:
        descriptor: Its end of the channel.
        output: Where it writes; what it prints is not the user's program's output.
    """
    path = [os.path.abspath(entry) for entry in sys.path]
    return subprocess.Popen(
        # -P: before it has this path, no file in the current folder may take the place of a module.
        [sys.executable, "-P", "-c", _BEGIN, str(descriptor), str(os.getpid()), *path],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> str:
    """Wait for the process, which has lost its channel and should end by itself; says how it ended."""
    try:
        code = process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "stopped answering"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (is the machine short of memory?)" if -code == signal.SIGKILL else "")


def _last_words(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _SHOWN_BYTES))
    lines = output.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join([" Its last words:", *lines]) if any(lines) else ""

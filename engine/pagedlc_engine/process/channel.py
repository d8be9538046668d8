"""Messages between two processes."""

from __future__ import annotations

import ctypes
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

__all__ = ["PROTOCOL", "Channel"]

logger = logging.getLogger(__name__)

PROTOCOL = 5
#: Whatever has come is read with one system call, since a reader gives up the interpreter for each.
_BUFFER_BYTES = 1 << 18
_JOIN_SECONDS = 1.0
#: A program that ends by SIGPIPE at a closed pipe does not end by a closed channel. (macOS has no such flag.)
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)

# Keeps the interpreter lock. Python's own call gives it up, and against busy threads that costs more than the call.
_send_now = ctypes.PyDLL(None).send
_send_now.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_send_now.restype = ctypes.c_ssize_t


def _dump(batch: list[Any]) -> bytes:
    return pickle.dumps(batch, PROTOCOL)


class Channel:
    """Pickled messages over a stream socket, both ways; the processes must trust each other.

    Sending never waits for the other side: what the socket does not take at once, and everything after it, is left to a
    thread, which sends what has gathered meanwhile as one batch.

    Args:
        connection: A connected stream socket; the channel's own from now on.
        encode: Makes a batch of messages what is pickled: a list.
        decode: The other side's inverse of that.
        dump: Pickles it.
    """

    def __init__(
        self,
        connection: socket.socket,
        encode: Callable[[list[Any]], list[Any]] = list,
        decode: Callable[[list[Any]], list[Any]] = list,
        dump: Callable[[list[Any]], bytes] = _dump,
    ) -> None:
        self._socket = connection
        self._descriptor = connection.fileno()
        self._encode = encode
        self._decode = decode
        self._dump = dump
        # Reentrant, as whoever holds it may be interrupted by the garbage collector or a signal, and these send, too.
        self._lock = threading.RLock()
        self._closed = False
        #: Somebody is sending; what comes now waits.
        self._busy = False
        self._waiting: list[Any] = []
        self._left_over: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_left_over, name="pagedlc-sender", daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Send a message; one that cannot be sent any more is lost."""
        with self._lock:
            if self._closed:
                return
            if self._busy:
                self._waiting.append(message)
                return
            self._busy = True
            rest = b""
            try:
                data = self._pickled([message])
                sent = _send_now(self._descriptor, data, len(data), socket.MSG_DONTWAIT | _NO_SIGNAL)
                rest = data[max(sent, 0) :]
            finally:
                if rest or self._waiting:
                    self._left_over.put(rest)
                else:
                    self._busy = False

    def __iter__(self) -> Iterator[Any]:
        """The other side's messages, until one of the two closes; for one thread, once."""
        try:
            with open(self._descriptor, "rb", _BUFFER_BYTES, closefd=False) as incoming:
                while True:
                    yield from self._decode(pickle.load(incoming))
        except (EOFError, OSError, pickle.UnpicklingError):
            # The other side may have been killed between two bytes of a message.
            return
        finally:
            self.close()
            self._sender.join(_JOIN_SECONDS)
            self._socket.close()

    def flush(self, timeout: float) -> None:
        """Wait until all messages are on their way, but not longer than ``timeout`` seconds; no more can be sent."""
        self._left_over.put(None)
        self._sender.join(timeout)

    def close(self) -> None:
        """Break off, now, both ways: both sides' readers come to their end."""
        with self._lock:
            self._closed = True
        self._left_over.put(None)
        # Not closed but shut down: that also ends what other threads are doing with it, and forked copies of it.
        with suppress(OSError):  # the other side was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def _pickled(self, batch: list[Any]) -> bytes:
        return self._dump(self._encode(batch))

    def _send_left_over(self) -> None:
        try:
            while (data := self._left_over.get()) is not None:
                self._socket.sendall(data, _NO_SIGNAL)
                while batch := self._gathered():
                    self._socket.sendall(self._pickled(batch), _NO_SIGNAL)
        except OSError:
            self.close()
        except Exception:
            logger.exception("A message cannot be sent.")
            self.close()

    def _gathered(self) -> list[Any]:
        with self._lock:
            batch, self._waiting = self._waiting, []
            if not batch:
                self._busy = False
        return batch

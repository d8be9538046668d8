"""Messages between two processes."""

from __future__ import annotations

import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

_PROTOCOL = 5
#: Whatever has come is read with one system call, since a reader gives up the interpreter for each.
_BUFFER_BYTES = 1 << 18
_JOIN_SECONDS = 1.0


class Channel:
    """Pickled messages over a stream socket, both ways; the processes must trust each other.

    Sending never waits: a thread takes what has gathered meanwhile and sends it as one batch.

    Args:
        connection: A connected stream socket; the channel's own from now on.
        encode: Makes a batch of messages what is pickled: a list.
        decode: The other side's inverse of that.
    """

    def __init__(
        self,
        connection: socket.socket,
        encode: Callable[[list[Any]], list[Any]] = list,
        decode: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        self._socket = connection
        self._encode = encode
        self._decode = decode
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="pagedlc-sender", daemon=True)
        self._sender.start()

    def send(self, message: Any) -> None:
        """Queue a message (anything but ``None``); one that cannot be sent any more is lost."""
        self._outbox.put(message)

    def __iter__(self) -> Iterator[Any]:
        """The other side's messages, until one of the two closes; for one thread, once."""
        try:
            with open(self._socket.fileno(), "rb", _BUFFER_BYTES, closefd=False) as incoming:
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
        self._outbox.put(None)
        self._sender.join(timeout)

    def close(self) -> None:
        """Break off, now, both ways: both sides' readers come to their end."""
        self._outbox.put(None)
        self._hang_up()

    def _hang_up(self) -> None:
        # Not closed but shut down: that also ends what other threads are doing with it, and forked copies of it.
        with suppress(OSError):  # the other side was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        try:
            while (batch := self._gathered()) is not None:
                self._socket.sendall(pickle.dumps(self._encode(batch), _PROTOCOL))
        except OSError:
            self._hang_up()
        except Exception:
            logger.exception("A message cannot be sent.")
            self._hang_up()

    def _gathered(self) -> list[Any] | None:
        """Wait for a message; returns all that are there, or ``None`` at the end."""
        batch = [self._outbox.get()]
        with suppress(Empty):
            while batch[-1] is not None:
                batch.append(self._outbox.get_nowait())
        if batch[-1] is not None:
            return batch
        self._outbox.put(None)
        return batch[:-1] or None

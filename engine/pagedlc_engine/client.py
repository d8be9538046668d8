"""How the rest of the process talks to an engine: submit, abort, stats, close.

The engine runs in a thread of this process or in a process of its own (``hosts.py``), and never waits for a consumer.
Its deltas are put into mailboxes; a consumer that lags finds its tokens merged into one larger delta. All text work
happens on the consumer's side.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from pagedlc_engine.errors import (
    MAKE_ANEW,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PagedLCError,
    own_copy,
)
from pagedlc_engine.hosts import EngineHost
from pagedlc_engine.kv.hashing import LatestChains, root_key
from pagedlc_engine.messages import Abort, Configure, CountCached, Output, ResetPrefixCache, Submit, join_deltas
from pagedlc_engine.request import Request, TokenDelta, token_array
from pagedlc_engine.stats import EngineStats
from pagedlc_engine.validation import check_request

__all__ = ["EngineClient", "Mailbox", "RequestHandle"]

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Mailbox:
    """Deltas of one or more requests on their way to whoever takes them.

    Any number of threads and asyncio tasks may take from it; each delta goes to one of them.

    Args:
        expected: Answers whose last delta must come before the mailbox is done.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._done = False
        #: The callers' names of the requests, by the engine's.
        self.names: dict[str, str] = {}
        self._queue: SimpleQueue[TokenDelta | None] = SimpleQueue()
        self._process = os.getpid()
        self._waiters: deque[_Waiter] = deque()

    def put(self, delta: TokenDelta) -> list[_Waiter]:
        """Add a delta (engine's side only); returns the asyncio waiters to wake."""
        self._queue.put(delta)
        if delta.finish_reason is not None:
            self._expected -= 1
            if self._expected == 0:
                self._done = True
                self._queue.put(None)
        woken = []
        while self._waiters:
            woken.append(self._waiters.popleft())
        return woken

    def take(self) -> list[TokenDelta]:
        """Wait for deltas; returns all that are there, merged per answer. Empty when all answers are done.

        Raises:
            EngineDeadError: This process was forked from the one the engine runs in.
        """
        _check_process(self._process)
        first = self._queue.get()
        if first is None:
            self._queue.put(None)
            return []
        return self._merge([first, *self._take_waiting()])

    async def take_async(self) -> list[TokenDelta]:
        """:meth:`take` for asyncio."""
        _check_process(self._process)
        while True:
            loop = asyncio.get_running_loop()
            waiter = (loop, loop.create_future())
            self._waiters.append(waiter)
            # Looked at after the waiter is there: whatever comes later wakes it.
            try:
                first = self._queue.get_nowait()
            except Empty:
                # Done and empty: another taker holds the end mark for a moment, and nobody would wake this one.
                if self._done:
                    return []
                await waiter[1]
                continue
            if first is None:
                self._queue.put(None)
                return []
            return self._merge([first, *self._take_waiting()])

    def _take_waiting(self) -> Iterator[TokenDelta]:
        while True:
            try:
                delta = self._queue.get_nowait()
            except Empty:
                return
            if delta is None:
                self._queue.put(None)
                return
            yield delta

    def _merge(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        joined = deltas if len(deltas) == 1 else join_deltas(deltas)
        return [delta.under(self.names[delta.request_id]) for delta in joined]


def _check_process(owner: int) -> None:
    if os.getpid() != owner:
        raise EngineDeadError(f"This engine belongs to the process that this one was forked from. {MAKE_ANEW}")


class RequestHandle:
    """A submitted request; iterate it (``for`` or ``async for``) to get its deltas.

    Iteration raises the request's error, if it has one, after what came before it. Closing the handle, or dropping it,
    gives the request up and frees its KV blocks within one step.
    """

    def __init__(self, client: EngineClient, request_id: str, key: str, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self._key = key
        self._client = client
        self._mailbox = mailbox

    def __iter__(self) -> Iterator[TokenDelta]:
        while deltas := self._mailbox.take():
            yield from _checked(deltas)

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        while deltas := await self._mailbox.take_async():
            for delta in _checked(deltas):
                yield delta

    def abort(self, index: int | None = None) -> None:
        """Give up the request or one of its answers; its last delta comes with ``finish_reason="abort"``."""
        self._client.abort_key(self._key, index)

    def close(self) -> None:
        """Give up the request, if it is not finished; no further delta comes."""
        self._client.drop(self._key)

    def __del__(self) -> None:
        self.close()


def _checked(deltas: list[TokenDelta]) -> Iterator[TokenDelta]:
    for delta in deltas:
        if delta.error is None:
            yield delta
            continue
        if delta.token_ids:
            yield replace(delta, finish_reason=None, error=None)
        raise own_copy(delta.error)


@dataclass(slots=True)
class _Pending:
    """A request on its way, and which of its answers are unfinished."""

    request_id: str
    mailbox: Mailbox
    open: set[int]

    def put(self, delta: TokenDelta) -> list[_Waiter]:
        if delta.finish_reason is not None:
            self.open.discard(delta.index)
        return self.mailbox.put(delta)


class EngineClient:
    """An engine, wherever it runs, and the requests on their way through it.

    Args:
        host: Runs the engine; started, and later closed, by the client.
    """

    def __init__(self, host: EngineHost) -> None:
        info = host.info
        self.max_model_len = info.max_model_len
        #: ``"cpu"`` or ``"cuda"``.
        self.device = info.device
        self._vocab_size = info.vocab_size
        self.block_size = info.block_size
        self._chains = LatestChains(info.block_size) if info.enable_prefix_caching else None
        # Reentrant, as a signal may interrupt whoever holds it with a handler that closes the engine.
        self._lock = threading.RLock()
        # The engine gets names of the client's making: a caller may use a name again while the engine is still busy
        # giving up its last request of that name.
        self._keys: dict[str, str] = {}
        self._serials = itertools.count()
        self._pending: dict[str, _Pending] = {}
        self._queries: dict[int, Future[int]] = {}
        self._query_ids = itertools.count()
        self._stats = info.stats
        self._ended: PagedLCError | None = None
        self._process = os.getpid()
        self._host = host
        # Also runs when the client is garbage, and before the interpreter exits.
        self._stop = weakref.finalize(self, host.close, 60.0)
        host.start(_deliver_to(weakref.ref(self)))

    def submit(self, request: Request, mailbox: Mailbox | None = None) -> RequestHandle:
        """Hand a request to the engine; returns at once.

        Args:
            request: Its ``block_hashes`` and ``arrival_time`` are filled in here, on the caller's thread.
            mailbox: Where its deltas go, if several requests are to be read together.

        Raises:
            EngineClosedError: The engine was closed.
            EngineDeadError: The engine failed earlier, or belongs to the process this one was forked from.
            InvalidRequestError: The request id is in use, or :func:`check_request` objects.
        """
        (handle,) = self.submit_all([request], mailbox or Mailbox(request.params.n))
        return handle

    def submit_all(self, requests: Sequence[Request], mailbox: Mailbox) -> list[RequestHandle]:
        """:meth:`submit` for requests that are read together. They reach the engine one right after the other, so that
        a step takes in as many as it can."""
        # Before the lock, which another thread may have held when this process was forked.
        _check_process(self._process)
        checked = [self._check(request) for request in requests]
        hashes = [self._block_hashes(request) for request in checked]
        with self._lock:
            self._check_alive()
            handles = [self._send(*pair, mailbox) for pair in zip(checked, hashes, strict=True)]
            self._check_alive()
        return handles

    def _check(self, request: Request) -> Request:
        request = replace(request, prompt_token_ids=token_array(request.prompt_token_ids))
        check_request(request, self._vocab_size, self.max_model_len)
        return request

    def _send(self, request: Request, hashes: tuple[bytes, ...], mailbox: Mailbox) -> RequestHandle:
        name = request.request_id
        if name in self._keys:
            raise InvalidRequestError(f"A request with id {name!r} is running already.")
        key = f"{name}/{next(self._serials)}"
        self._keys[name] = key
        mailbox.names[key] = name
        self._pending[key] = _Pending(name, mailbox, set(range(request.params.n)))
        try:
            now = time.monotonic()
            self._host.send(Submit(replace(request, request_id=key, block_hashes=hashes, arrival_time=now)))
        except BaseException:
            self._forget(key)
            raise
        return RequestHandle(self, name, key, mailbox)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Give up a request, or one of its answers. Unknown and finished ids are ignored."""
        key = self._keys.get(request_id)
        if key is not None:
            self.abort_key(key, index)

    def abort_key(self, key: str, index: int | None = None) -> None:
        """:meth:`abort` by the engine's name for a request."""
        if self._ended is None:
            self._host.send(Abort(key, index))

    def drop(self, key: str) -> None:
        """Give up a request whose deltas nobody will read."""
        if self._forget(key):
            self.abort_key(key)

    def _forget(self, key: str) -> bool:
        pending = self._pending.pop(key, None)
        if pending is not None and self._keys.get(pending.request_id) == key:
            del self._keys[pending.request_id]
        return pending is not None

    @property
    def ended(self) -> bool:
        """Whether the engine was closed, has failed, or was left behind in the process that forked this one."""
        return self._ended is not None or os.getpid() != self._process

    def stats(self) -> EngineStats:
        """The snapshot of the last step."""
        return self._stats

    def configure(self, max_num_seqs: int) -> None:
        """Change how many answers may run at once, from the next step on."""
        if not isinstance(max_num_seqs, int) or max_num_seqs < 1:
            raise InvalidRequestError(f"max_num_seqs must be a whole number from 1, not {max_num_seqs!r}.")
        self._check_alive()
        self._host.send(Configure(max_num_seqs))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, from the next step on; running requests go on."""
        self._check_alive()
        self._host.send(ResetPrefixCache())

    def count_cached_tokens(self, request: Request) -> int:
        """How many of the prompt's tokens the prefix cache would serve now; the prompt is not computed.

        Raises:
            EngineClosedError, EngineDeadError: As :meth:`submit`.
        """
        hashes = self._block_hashes(request)
        answer: Future[int] = Future()
        with self._lock:
            self._check_alive()
            query_id = next(self._query_ids)
            self._queries[query_id] = answer
            self._host.send(CountCached(query_id, hashes))
            self._check_alive()
        return min(answer.result() * self.block_size, len(request.prompt_token_ids) - 1)

    def _block_hashes(self, request: Request) -> tuple[bytes, ...]:
        if self._chains is None:
            return ()
        root = root_key(request.cache_salt, request.extra_keys)
        return self._chains.hash_blocks(root, token_array(request.prompt_token_ids))

    def close(self) -> None:
        """End the engine and free its memory; unfinished requests get an :class:`EngineClosedError`."""
        self._stop()
        if os.getpid() == self._process:  # in a fork nobody waits for anything
            self._end(EngineClosedError("The engine was closed before the request was finished."))

    def _check_alive(self) -> None:
        _check_process(self._process)
        if isinstance(self._ended, EngineClosedError):
            raise EngineClosedError("The engine is closed; make a new one.")
        if self._ended is not None:
            raise own_copy(self._ended)

    def _deliver(self, output: Output) -> None:
        if output.stats is not None:
            self._stats = output.stats
        for query_id, reply in output.replies.items():
            self._queries.pop(query_id).set_result(reply)
        waiters: list[_Waiter] = []
        for delta in output.deltas:
            pending = self._pending.get(delta.request_id)
            if pending is None:
                continue
            waiters += pending.put(delta)
            if not pending.open:
                self._forget(delta.request_id)
        _wake(waiters)
        if output.died is not None:
            self._end(output.died)

    def _end(self, error: PagedLCError) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = error
            self._stats = self._stats.ended()
            unfinished, self._pending = self._pending, {}
            self._keys.clear()
            unanswered, self._queries = self._queries, {}
        for query in unanswered.values():
            query.set_exception(error)
        waiters: list[_Waiter] = []
        for request_id, pending in unfinished.items():
            for index in sorted(pending.open):
                waiters += pending.put(TokenDelta(request_id, index, [], finish_reason="error", error=error))
        _wake(waiters)


def _deliver_to(client: weakref.ref[EngineClient]) -> Callable[[Output], bool]:
    def deliver(output: Output) -> bool:
        there = client()
        if there is None:
            return False
        there._deliver(output)
        return True

    return deliver


def _wake(waiters: list[_Waiter]) -> None:
    """Wake asyncio waiters, with one call per event loop: each such call is a system call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in waiters:
        by_loop.setdefault(loop, []).append(future)
    for loop, futures in by_loop.items():
        # A loop may be closed at any time; whoever waited there is gone.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)

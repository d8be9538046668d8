"""Compiles grammars beside the engine's thread, each once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from pagedlc_engine.errors import InvalidRequestError, PagedLCError
from pagedlc_engine.grammar.base import TokenMatcher
from pagedlc_engine.grammar.spec import StructuredOutputsParams
from pagedlc_engine.grammar.vocabulary import TokenVocabulary

if TYPE_CHECKING:
    from pagedlc_engine.grammar.library import GrammarLibrary

__all__ = ["GrammarCompiler"]


class GrammarCompiler:
    """Turns specs into matchers, on a thread pool, and remembers the last ones.

    Args:
        vocabulary: Makes the model's vocabulary; called once, on the pool, when the first grammar comes.
        capacity: How many compiled grammars are remembered.
        text_capacity: Of how many characters in all, as they were given; the latest is remembered however long.
        time_limit: Seconds after which a grammar is given up.
    """

    def __init__(
        self,
        vocabulary: Callable[[], TokenVocabulary],
        *,
        capacity: int = 128,
        text_capacity: int = 256 << 10,
        time_limit: float = 30.0,
    ) -> None:
        self._make_vocabulary = vocabulary
        self._capacity = capacity
        self._text_capacity = text_capacity
        self._time_limit = time_limit
        self._pool: ThreadPoolExecutor | None = None
        self._library: GrammarLibrary | None = None
        self._library_lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, Future[TokenMatcher]] = OrderedDict()

    def compile(self, spec: StructuredOutputsParams) -> Future[TokenMatcher]:
        """The matcher at the beginning of an answer, to be copied for each; done at once if it is remembered.

        The future fails with a :class:`PagedLCError`. To be called from one thread only.
        """
        found = self._compiled.get(spec)
        if found is not None and not (found.done() and found.exception() is not None):
            self._compiled.move_to_end(spec)
            return found
        future = self._start(spec)
        self._compiled[spec] = future
        self._forget()
        return future

    def _forget(self) -> None:
        """Let go of failures, and of the oldest beyond what is to be remembered: a compiled grammar takes some hundred
        times the memory of its text."""
        for spec in [spec for spec, found in self._compiled.items() if found.done() and found.exception() is not None]:
            del self._compiled[spec]
        characters = sum(spec.num_characters for spec in self._compiled)
        while len(self._compiled) > 1 and (len(self._compiled) > self._capacity or characters > self._text_capacity):
            oldest, _ = self._compiled.popitem(last=False)
            characters -= oldest.num_characters

    def _start(self, spec: StructuredOutputsParams) -> Future[TokenMatcher]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="pagedlc-grammar")
        result: Future[TokenMatcher] = Future()
        # Waiting for the others counts too: no request waits for its grammar longer than this.
        timer = threading.Timer(self._time_limit, _fail, (result, self._too_long(spec)))
        timer.daemon = True
        result.add_done_callback(lambda _: timer.cancel())
        timer.start()
        self._pool.submit(self._run, spec, result)
        return result

    def _run(self, spec: StructuredOutputsParams, result: Future[TokenMatcher]) -> None:
        try:
            matcher = self._ready_library().compile(spec)
        except PagedLCError as error:
            _fail(result, error)
        except Exception as error:
            made = InvalidRequestError(f"{spec.subject} cannot be compiled: {error}")
            made.__cause__ = error
            _fail(result, made)
        else:
            _succeed(result, matcher)

    def _ready_library(self) -> GrammarLibrary:
        with self._library_lock:
            if self._library is None:
                # Imported with the first grammar: most programs need none.
                from pagedlc_engine.grammar.library import GrammarLibrary

                self._library = GrammarLibrary(self._make_vocabulary())
            return self._library

    def _too_long(self, spec: StructuredOutputsParams) -> PagedLCError:
        return InvalidRequestError(f"{spec.subject} was not compiled within {self._time_limit:g} seconds; simplify it.")


def _succeed(result: Future[TokenMatcher], matcher: TokenMatcher) -> None:
    with suppress(InvalidStateError):  # the time limit came first
        result.set_result(matcher)


def _fail(result: Future[TokenMatcher], error: PagedLCError) -> None:
    with suppress(InvalidStateError):  # the matcher, or the time limit, came first
        result.set_exception(error)

"""Requests whose grammar is being compiled. They hold nothing, and nobody waits behind them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from pagedlc_engine.grammar.base import TokenMatcher
from pagedlc_engine.request import Request, RequestTimings, TokenDelta

__all__ = ["GrammarQueue", "WaitingForGrammar"]


@dataclass(frozen=True, slots=True)
class WaitingForGrammar:
    """One such request.

    Args:
        request: The request.
        seed: Drawn when it arrived.
        matcher: Where its compiled grammar will be.
        given_up: Answers that were aborted meanwhile.
    """

    request: Request
    seed: int
    matcher: Future[TokenMatcher]
    given_up: set[int] = field(default_factory=set)


class GrammarQueue:
    """Waiting requests in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, WaitingForGrammar] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_answers(self) -> int:
        """Answers that wait here."""
        return sum(item.request.params.n - len(item.given_up) for item in self._waiting.values())

    @property
    def any_ready(self) -> bool:
        """True when :meth:`take_ready` would return something."""
        return any(item.matcher.done() for item in self._waiting.values())

    def put(self, item: WaitingForGrammar) -> None:
        """Let a request wait."""
        self._waiting[item.request.request_id] = item

    def take_ready(self) -> list[WaitingForGrammar]:
        """The requests whose grammar is there, or has failed; they wait no longer."""
        ready = [item for item in self._waiting.values() if item.matcher.done()]
        for item in ready:
            del self._waiting[item.request.request_id]
        return ready

    def abort(self, request_id: str, index: int | None) -> list[TokenDelta]:
        """Give up a request, or one of its answers; unknown ids are ignored."""
        item = self._waiting.get(request_id)
        if item is None:
            return []
        every = range(item.request.params.n)
        chosen = [number for number in every if index in (None, number) and number not in item.given_up]
        item.given_up.update(chosen)
        if len(item.given_up) == len(every):
            del self._waiting[request_id]
        timings = RequestTimings(item.request.arrival_time, finished=time.monotonic())
        return [TokenDelta(request_id, number, [], finish_reason="abort", timings=timings) for number in chosen]

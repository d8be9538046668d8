"""Which sequences get how many tokens in the next step.

There is no prefill phase and no decode phase: a step grants tokens, under one budget, to sequences whose
``num_computed`` lags behind ``num_tokens`` (the formulation of vLLM V1; chunks of a prompt mixed into decode
batches as in Sarathi-Serve, arXiv 2403.02310). Planning never looks at a token's value, so a step can be
planned while earlier ones still run; only sequences under a grammar wait for their last token. Pure Python over
integers; no tensors.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagedlc_engine.errors import InvalidRequestError, PagedLCError
from pagedlc_engine.kv.manager import KVCacheManager
from pagedlc_engine.plan import BAD_LOGITS, ScheduledSequence, StepPlan, StepResult
from pagedlc_engine.request import FinishReason, Request, TokenDelta, TokenLogprobs
from pagedlc_engine.sequence import Sequence, Status
from pagedlc_engine.stats import EngineStats

if TYPE_CHECKING:
    from pagedlc_engine.grammar.base import TokenMatcher

__all__ = ["Scheduler"]


class Scheduler:
    """Queues of sequences, and the arithmetic of steps.

    Args:
        cache: Block tables and the prefix cache.
        max_num_seqs: Most sequences running at once; may be changed between steps.
        max_num_batched_tokens: Most tokens computed in one step.
        max_model_len: Most tokens of a sequence, prompt and answer together.
        max_num_batched_tokens_while_streaming: Most tokens of a step that somebody who reads along waits for;
            ``None`` makes no difference.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_batched_tokens_while_streaming: int | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._streaming_tokens = min(
            max_num_batched_tokens_while_streaming or max_num_batched_tokens, max_num_batched_tokens
        )
        self.max_model_len = min(max_model_len, cache.pool.num_usable * cache.block_size)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._being_computed: dict[bytes, Sequence] = {}
        self._keys = itertools.count()
        self._released: list[int] = []
        self._num_arrived = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.num_generated = 0
        self._num_preemptions = 0

    # -- requests come and go -------------------------------------------------------------------------

    def add(self, request: Request, seed: int, matcher: TokenMatcher | None = None) -> None:
        """Queue a request.

        Args:
            request: Must have passed :func:`pagedlc_engine.validation.check_request`.
            seed: Used when ``request.params.seed`` is ``None``; answer ``i`` of ``n`` adds ``i``.
            matcher: At the beginning of the request's grammar, if it has one; each answer follows a copy.

        Raises:
            InvalidRequestError: A live request has its id.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(f"A request with id {request.request_id!r} is running already.")
        params = request.params
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + params.max_tokens)
        first = seed if params.seed is None else params.seed
        answers = [
            Sequence(
                key=next(self._keys),
                request=request,
                index=index,
                order=self._num_arrived,
                limit=limit,
                seed=first + index,
                matcher=None if matcher is None else matcher.copy(),
            )
            for index in range(params.n)
        ]
        for answer in answers[1:]:
            answer.fork_of = answers[0]
        self._num_arrived += 1
        self._requests[request.request_id] = answers
        for answer in answers:
            insort(self._waiting, answer, key=lambda item: item.sort_key)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """Give up a request, or one of its answers; unknown ids are ignored (it may just have finished)."""
        answers = list(self._requests.get(request_id, ()))
        return [self._finish(item, "abort") for item in answers if index is None or item.index == index]

    def fail(self, request_id: str, error: PagedLCError) -> list[TokenDelta]:
        """End all answers of a request with an error."""
        return [self._finish(item, "error", error=error) for item in list(self._requests.get(request_id, ()))]

    def fail_step(self, plan: StepPlan, error: PagedLCError) -> list[TokenDelta]:
        """End every request of a step that could not be computed, and forget cached blocks it may have spoilt."""
        deltas = []
        for item in plan.scheduled:
            deltas += self.fail(item.sequence.request.request_id, error)
        self.cache.pool.forget_all()
        return deltas

    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self._waiting or self._running)

    def live_request_ids(self) -> list[str]:
        """Ids of requests that have unfinished answers."""
        return list(self._requests)

    # -- planning -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step and count its tokens as computed; ``None`` when nothing can be computed now."""
        plan = StepPlan()
        preemptions = self._num_preemptions
        budget = self._token_budget()
        for sequence in self._running_in_turn():
            if sequence.status is Status.RUNNING and budget > 0 and sequence.num_uncomputed > 0:
                budget -= self._continue(sequence, budget, plan)
        if self._num_preemptions == preemptions:
            self._admit(budget, plan)
        if not plan.scheduled:
            return None
        plan.released, self._released = self._released, []
        return plan

    def _token_budget(self) -> int:
        """A long step is a gap in every stream, so there is one only while nobody reads along."""
        streaming = self._streaming_tokens < self.max_num_batched_tokens and any(
            not sequence.request.whole and not sequence.prefilling for sequence in self._running
        )
        return self._streaming_tokens if streaming else self.max_num_batched_tokens

    def _running_in_turn(self) -> Iterator[Sequence]:
        """Sequences that need one token come first: a long prompt must not hold up the others' streams."""
        snapshot = list(self._running)
        yield from (sequence for sequence in snapshot if not sequence.prefilling)
        yield from (sequence for sequence in snapshot if sequence.prefilling)

    def _continue(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        count = min(sequence.num_uncomputed, budget)
        end = sequence.num_computed + count
        copies = self.cache.grow(sequence.key, sequence.num_computed, end)
        while copies is None:
            victim = self._victim(sequence, plan)
            if victim is None:
                return 0
            self._preempt(victim)
            if victim is sequence:
                return 0
            copies = self.cache.grow(sequence.key, sequence.num_computed, end)
        plan.copies += copies
        self._grant(sequence, count, plan)
        return count

    def _victim(self, sequence: Sequence, plan: StepPlan) -> Sequence | None:
        """The least important sequence not in this step's plan, if it is no more important than ``sequence``."""
        planned = {item.sequence.key for item in plan.scheduled}
        for item in plan.scheduled:
            planned.update(sampler.key for sampler in item.samplers)
        for candidate in reversed(self._running):
            if candidate.sort_key < sequence.sort_key:
                return None
            if candidate.key not in planned:
                return candidate
        return None

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits and is recomputed, from the prefix cache as far as that still holds."""
        self._running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = 0
        sequence.num_registered = 0
        self._num_preemptions += 1
        insort(self._waiting, sequence, key=lambda item: item.sort_key)

    def _admit(self, budget: int, plan: StepPlan) -> None:
        at = 0
        while at < len(self._waiting) and budget > 0 and len(self._running) < self.max_num_seqs:
            sequence = self._waiting[at]
            if sequence.num_inflight or sequence.awaits_fork or self._prefix_is_coming(sequence):
                at += 1
                continue
            prefix = self._match(sequence)
            if self._prefix_is_coming(sequence):
                at += 1
                continue
            # A little room stays free so that the running sequences can grow before anyone is preempted.
            reserve = len(self._running)
            if not self.cache.open(sequence.key, prefix, sequence.num_tokens, reserve):
                return
            del self._waiting[at]
            budget -= self._start(sequence, len(prefix), budget, plan)

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached blocks of a waiting sequence; if another one is computing the next block, waits for that.

        They may hold all of its tokens. Its last token is computed then, to go on from, and its key and value are
        written where they are: only into a block that nobody else holds.
        """
        if not self.cache.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return []
        known = sequence.num_tokens
        full = known // self.cache.block_size
        if full:
            sequence.block_key(full - 1, self.cache.block_size)
        prefix = self.cache.match_prefix(sequence.block_keys, known)
        if len(prefix) * self.cache.block_size == known and not self.cache.pool.is_free(prefix[-1]):
            return prefix[:-1]
        if len(prefix) < (known - 1) // self.cache.block_size:
            sequence.waits_for = self._being_computed.get(sequence.block_keys[len(prefix)])
        return prefix

    def _prefix_is_coming(self, sequence: Sequence) -> bool:
        other = sequence.waits_for
        if other is not None and (other.status is not Status.RUNNING or not other.prefilling):
            sequence.waits_for = other = None
        return other is not None

    def _start(self, sequence: Sequence, prefix_blocks: int, budget: int, plan: StepPlan) -> int:
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=lambda item: item.sort_key)
        sequence.num_computed = min(prefix_blocks * self.cache.block_size, sequence.num_tokens - 1)
        sequence.num_registered = prefix_blocks
        if sequence.timings.scheduled is None:
            sequence.timings.scheduled = time.monotonic()
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            self._prompt_tokens += sequence.num_prompt
            self._cached_tokens += sequence.num_cached_tokens
        count = min(sequence.num_uncomputed, budget)
        self._grant(sequence, count, plan)
        if sequence.num_uncomputed and sequence.prefilling and self.cache.enable_prefix_caching:
            for key in sequence.block_keys[sequence.num_registered :]:
                self._being_computed.setdefault(key, sequence)
        return count

    def _grant(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        item = ScheduledSequence(sequence, sequence.num_computed, count)
        plan.scheduled.append(item)
        sequence.num_computed += count
        self._register_full_blocks(sequence)
        if sequence.num_computed < sequence.num_tokens:
            return
        item.samplers.append(sequence)
        if sequence.request.params.n > 1 and sequence.index == 0:
            self._fork(sequence, item)
        for sampler in item.samplers:
            sampler.num_inflight += 1

    def _fork(self, parent: Sequence, item: ScheduledSequence) -> None:
        """Start the request's other answers on the same blocks; those for which there is no room stay queued."""
        for child in self._requests[parent.request.request_id]:
            if child.fork_of is not parent:
                continue
            child.fork_of = None
            if len(self._running) >= self.max_num_seqs:
                continue
            self._waiting.remove(child)
            self.cache.fork(parent.key, child.key)
            child.status = Status.RUNNING
            child.num_computed = parent.num_computed
            child.num_registered = parent.num_registered
            child.num_cached_tokens = parent.num_cached_tokens
            child.timings.scheduled = parent.timings.scheduled
            insort(self._running, child, key=lambda item: item.sort_key)
            item.samplers.append(child)

    def _register_full_blocks(self, sequence: Sequence) -> None:
        """Make a sequence's full blocks findable as soon as a step that fills them is planned.

        Steps run in order, and a step writes all its keys and values before it attends, so whoever matches
        such a block, even in the same step, reads what was written.
        """
        block_size = self.cache.block_size
        full = min(sequence.num_computed, len(sequence.tokens)) // block_size
        while sequence.num_registered < full and self.cache.enable_prefix_caching:
            key = sequence.block_key(sequence.num_registered, block_size)
            self.cache.register(sequence.key, sequence.num_registered, key)
            if self._being_computed.get(key) is sequence:
                del self._being_computed[key]
            sequence.num_registered += 1

    # -- results --------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Take in a step's sampled tokens; returns what they add to the answers."""
        deltas = []
        at = 0
        for position, item in enumerate(plan.scheduled):
            if position in result.prompt_logprobs:
                self._collect_prompt_logprobs(item, result.prompt_logprobs[position])
            for sampler in item.samplers:
                if sampler.status is not Status.FINISHED:
                    delta = self._append(sampler, at, result)
                    if delta is not None:
                        deltas.append(delta)
                at += 1
        return deltas

    def _collect_prompt_logprobs(self, item: ScheduledSequence, rows: list[TokenLogprobs]) -> None:
        known = item.sequence.prompt_logprobs
        known.extend(rows[len(known) - 1 - item.start :])

    def _append(self, sequence: Sequence, at: int, result: StepResult) -> TokenDelta | None:
        sequence.num_inflight -= 1
        if at in result.failures:
            problem = result.failures[at]
            error = PagedLCError(problem) if problem == BAD_LOGITS else InvalidRequestError(problem)
            return self._finish(sequence, "error", error=error)
        token = result.token_ids[at]
        sequence.tokens.append(token)
        self.num_generated += 1
        if sequence.timings.first_token is None:
            sequence.timings.first_token = time.monotonic()
        logprobs = result.logprobs[at]
        reason, stop_reason = self._finish_reason(sequence, token)
        if sequence.matcher is not None and reason != "stop":
            refusal = sequence.matcher.accept(token)
            if refusal is not None:
                return self._finish(sequence, "error", error=InvalidRequestError(refusal))
            reason = "stop" if sequence.matcher.complete else reason
        if logprobs is not None:
            sequence.held_logprobs.append(logprobs)
        if reason is not None:
            return self._finish(sequence, reason, [token], stop_reason)
        if sequence.status is Status.RUNNING:
            self._register_full_blocks(sequence)
        return None if sequence.request.whole else self._delta(sequence, [token])

    def _finish_reason(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        if token in sequence.stop_token_ids and sequence.num_output > sequence.request.params.min_tokens:
            return "stop", token if token in sequence.request.params.stop_token_ids else None
        if len(sequence.tokens) >= sequence.limit:
            return "length", None
        return None, None

    def _delta(
        self,
        sequence: Sequence,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        error: PagedLCError | None = None,
    ) -> TokenDelta:
        params = sequence.request.params
        first = sequence.num_output == len(token_ids) and sequence.index == 0
        logprobs, sequence.held_logprobs = sequence.held_logprobs, []
        return TokenDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            logprobs=logprobs or None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=sequence.prompt_logprobs if first and params.prompt_logprobs is not None else None,
            num_cached_tokens=sequence.num_cached_tokens,
            timings=sequence.timings.copy(),
            error=error,
        )

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        stop_reason: int | None = None,
        error: PagedLCError | None = None,
    ) -> TokenDelta:
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._settle_blocks(sequence, trusted=error is None)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._released.append(sequence.key)
        sequence.timings.finished = time.monotonic()
        answers = self._requests[sequence.request.request_id]
        answers.remove(sequence)
        if not answers:
            del self._requests[sequence.request.request_id]
        if sequence.request.whole:
            token_ids = sequence.tokens[sequence.num_prompt :].tolist()
        return self._delta(sequence, token_ids or [], reason, stop_reason, error)

    def _settle_blocks(self, sequence: Sequence, trusted: bool) -> None:
        """Leave a finished sequence's blocks in the prefix cache, unless an error may have spoilt them."""
        if trusted:
            self._register_full_blocks(sequence)
        else:
            self.cache.pool.forget(self.cache.table(sequence.key))

    def _release(self, sequence: Sequence) -> None:
        self.cache.close(sequence.key)
        for key in sequence.block_keys[sequence.num_registered :]:
            if self._being_computed.get(key) is sequence:
                del self._being_computed[key]

    # -- numbers --------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and counters."""
        pool = self.cache.pool
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            kv_cache_usage=1.0 - pool.num_free / pool.num_usable,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self.num_generated,
            num_preemptions=self._num_preemptions,
            max_num_seqs=self.max_num_seqs,
        )

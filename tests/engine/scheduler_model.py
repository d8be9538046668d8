"""A stand-in for the model: the next token is a function of the tokens so far, and nothing else."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from pagedlc_engine.kv.block_pool import BlockPool
from pagedlc_engine.kv.hashing import LatestChains, root_key
from pagedlc_engine.kv.manager import KVCacheManager
from pagedlc_engine.plan import StepPlan, StepResult
from pagedlc_engine.request import Request, SamplingParams, TokenDelta
from pagedlc_engine.scheduler import Scheduler
from pagedlc_engine.sequence import Status

BLOCK = 16
VOCAB = 7


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % VOCAB


def expected_answer(request: Request, max_model_len: int) -> list[int]:
    tokens = list(request.prompt_token_ids)
    answer: list[int] = []
    while True:
        tokens.append(next_token(tokens))
        answer.append(tokens[-1])
        stopped = tokens[-1] in request.params.stop_token_ids
        if stopped or len(answer) == request.params.max_tokens or len(tokens) >= max_model_len:
            return answer


def make_request(
    name: str, prompt: list[int], *, priority: int = 0, salt: str | None = None, **params: object
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        priority=priority,
        cache_salt=salt,
        block_hashes=LatestChains(BLOCK).hash_blocks(root_key(salt), array("i", prompt)),
    )


class FakeEngine:
    """Steps a scheduler with the stand-in model, and keeps every physical slot's contents to check reads.

    ``written[slot]`` is the (sequence-independent) content of a KV slot: the tokens up to and including the
    one stored there. Reading a slot whose content is not the reader's own prefix is a corruption.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        max_num_seqs: int = 4,
        budget: int = 32,
        while_streaming: int | None = None,
        caching: bool = True,
        run_ahead: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = KVCacheManager(self.pool, BLOCK, caching)
        self.scheduler = Scheduler(self.cache, max_num_seqs, budget, 10_000, while_streaming)
        self.run_ahead = run_ahead
        self.launched: deque[tuple[StepPlan, list[int]]] = deque()
        self.written: dict[int, tuple[int, ...]] = {}
        self.deltas: list[TokenDelta] = []
        self.computed_tokens = 0
        self._streams: dict[int, list[int]] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request, seed=0)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.deltas += self.scheduler.abort(request_id, index)

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
            self.launched.append((plan, self._launch(plan)))
        if self.launched and (plan is None or len(self.launched) > self.run_ahead):
            self._take_in()
        self.check_blocks()

    def run(self, max_steps: int = 20_000) -> None:
        steps = 0
        while self.scheduler.has_work() or self.launched:
            self.step()
            steps += 1
            assert steps < max_steps, f"no progress: {self.scheduler.stats()}"

    def _launch(self, plan: StepPlan) -> list[int]:
        """The "device": knows every token it sampled, also those the scheduler has not seen yet."""
        for source, target in plan.copies:
            for offset in range(BLOCK):
                if source * BLOCK + offset in self.written:
                    self.written[target * BLOCK + offset] = self.written[source * BLOCK + offset]
        streams = {}
        for item in plan.scheduled:
            sequence = item.sequence
            stream = self._streams.setdefault(sequence.key, list(sequence.tokens))
            assert stream[: len(sequence.tokens)] == sequence.tokens.tolist()
            streams[sequence.key] = stream
            table = self.cache.table(sequence.key)
            assert 0 not in table
            for position in range(item.start, item.start + item.count):
                slot = table[position // BLOCK] * BLOCK + position % BLOCK
                self.written[slot] = tuple(stream[: position + 1])
            self.computed_tokens += item.count
        ids = []
        for item in plan.scheduled:
            self._check_reads(item.sequence.key, streams[item.sequence.key], item.start + item.count)
            for sampler in item.samplers:
                stream = self._streams.setdefault(sampler.key, list(sampler.tokens))
                token = next_token(stream)
                stream.append(token)
                ids.append(token)
        return ids

    def _check_reads(self, key: int, stream: list[int], end: int) -> None:
        table = self.cache.table(key)
        for position in range(end):
            slot = table[position // BLOCK] * BLOCK + position % BLOCK
            assert self.written.get(slot) == tuple(stream[: position + 1]), f"sequence {key} reads foreign KV"

    def _take_in(self) -> None:
        plan, ids = self.launched.popleft()
        self.deltas += self.scheduler.update(plan, StepResult(ids, [None] * len(ids)))

    def check_blocks(self) -> None:
        """No block lost, none counted twice, no partial block with two writers."""
        held: dict[int, int] = {}
        for sequence in self.scheduler._running:
            assert sequence.status is Status.RUNNING
            for block in self.cache.table(sequence.key):
                held[block] = held.get(block, 0) + 1
        for block in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block) == held.get(block, 0)
            assert self.pool.is_free(block) == (block not in held)
        assert self.pool.ref_count(0) == 0
        assert not self.pool.is_free(0)

    def answers(self, request_id: str) -> dict[int, list[TokenDelta]]:
        found: dict[int, list[TokenDelta]] = {}
        for delta in self.deltas:
            if delta.request_id == request_id:
                found.setdefault(delta.index, []).append(delta)
        return found

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for delta in self.answers(request_id)[index] for token in delta.token_ids]

"""One answer in the making: its tokens, and how far the engine has come with them."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING

from pagedlc_engine.kv.hashing import hash_block, root_key
from pagedlc_engine.request import Request, RequestTimings, TokenLogprobs

if TYPE_CHECKING:
    from pagedlc_engine.grammar.base import TokenMatcher

__all__ = ["Sequence", "Status"]


class Status(Enum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """The mutable record of one of a request's ``n`` answers.

    Every step lets ``num_computed`` catch up with ``num_tokens``. Both are counted when a step is *planned*;
    ``num_inflight`` of the tokens are sampled by steps whose results are not known yet.

    Args:
        key: Unique in the engine; names the block table and the sampler's slot.
        request: The request it answers.
        index: Which of the request's answers.
        order: Position in order of arrival, for fairness among equal priorities.
        limit: Most tokens, prompt and answer together.
        seed: Seed of its random numbers.
        matcher: Follows the answer through its grammar, if it has one; it has accepted all known answer tokens.
    """

    __slots__ = (
        "block_keys",
        "fork_of",
        "held_logprobs",
        "index",
        "key",
        "limit",
        "matcher",
        "num_cached_tokens",
        "num_computed",
        "num_inflight",
        "num_prompt",
        "num_registered",
        "order",
        "prompt_logprobs",
        "request",
        "seed",
        "status",
        "stop_token_ids",
        "timings",
        "tokens",
        "waits_for",
    )

    def __init__(
        self,
        key: int,
        request: Request,
        index: int,
        order: int,
        limit: int,
        seed: int,
        matcher: TokenMatcher | None = None,
    ) -> None:
        self.key = key
        self.request = request
        self.index = index
        self.order = order
        self.limit = limit
        self.seed = seed
        self.matcher = matcher
        self.tokens = array("i", request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_inflight = 0
        self.num_cached_tokens = 0
        self.block_keys = list(request.block_hashes)
        self.num_registered = 0
        self.fork_of: Sequence | None = None
        self.status = Status.WAITING
        self.waits_for: Sequence | None = None
        eos = () if request.params.ignore_eos else request.eos_token_ids
        self.stop_token_ids = frozenset((*eos, *request.params.stop_token_ids))
        self.timings = RequestTimings(request.arrival_time)
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        #: Of tokens that are handed over with the last one.
        self.held_logprobs: list[TokenLogprobs] = []

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Smaller is served first."""
        return (self.request.priority, self.order, self.index)

    @property
    def awaits_fork(self) -> bool:
        """True while another answer of the request is about to compute the prompt for this one as well."""
        return self.fork_of is not None and self.fork_of.status is not Status.FINISHED

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens, those in flight included."""
        return len(self.tokens) + self.num_inflight

    @property
    def num_output(self) -> int:
        """Known answer tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV no planned step computes yet; 0 when the limit is reached and nothing is left to do.

        Under a grammar, what may come next is not known before the tokens in flight are.
        """
        if self.num_tokens >= self.limit or (self.matcher is not None and self.num_inflight):
            return 0
        return self.num_tokens - self.num_computed

    @property
    def prefilling(self) -> bool:
        """True while known tokens before the last one still have to be computed."""
        return self.num_tokens - self.num_computed > 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the log-probabilities of all prompt tokens asked for are there."""
        return self.request.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def block_key(self, index: int, block_size: int) -> bytes:
        """Content key of the ``index``-th block, whose tokens must all be known."""
        while len(self.block_keys) <= index:
            parent = self.block_keys[-1] if self.block_keys else self.root_key
            start = len(self.block_keys) * block_size
            self.block_keys.append(hash_block(parent, self.tokens[start : start + block_size]))
        return self.block_keys[index]

    @property
    def root_key(self) -> bytes:
        """Parent of the first block's key."""
        return root_key(self.request.cache_salt, self.request.extra_keys)

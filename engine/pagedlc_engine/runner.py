"""Turns a step plan into tensors, runs the model over them and samples."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedlc_engine.attention.base import AttentionBackend, AttentionBatch
from pagedlc_engine.grammar.base import mask_words
from pagedlc_engine.plan import ScheduledSequence, StepPlan, StepResult
from pagedlc_engine.request import TokenLogprobs
from pagedlc_engine.sampling import Allowed, SampledTokens, Sampler, prompt_logprobs
from pagedlc_engine.sampling.rows import send_ints
from pagedlc_engine.sequence import Sequence

if TYPE_CHECKING:
    from pagedlc_engine.kv.manager import KVCacheManager
    from pagedlc_engine.model.decoder import StepModel
    from pagedlc_engine.threads import StepThreads

__all__ = ["ModelRunner", "PendingResult"]


@dataclass(slots=True)
class PendingResult:
    """A launched step; :meth:`get` waits for it. ``failures`` are those known before."""

    sampled: SampledTokens | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    failures: dict[int, str] = field(default_factory=dict)

    def done(self) -> bool:
        """Whether :meth:`get` returns without waiting."""
        return True

    def get(self) -> StepResult:
        """The step's tokens on the host."""
        if self.sampled is None:
            return StepResult([], [], self.prompt_logprobs)
        return StepResult(
            self.sampled.token_ids.tolist(),
            self.sampled.logprobs,
            self.prompt_logprobs,
            {**self.sampled.failures(), **self.failures},
        )


class ModelRunner:
    """Owns everything that lives on the device.

    Args:
        decoder: The model.
        backend: The paged KV cache and attention over it.
        sampler: Logits to token ids.
        cache: Where the sequences' block tables are.
        threads: How many CPU threads a step uses; ``None`` leaves that to torch.
    """

    def __init__(
        self,
        decoder: StepModel,
        backend: AttentionBackend,
        sampler: Sampler,
        cache: KVCacheManager,
        threads: StepThreads | None = None,
    ) -> None:
        self._threads = threads
        self.decoder = decoder
        self.backend = backend
        self.sampler = sampler
        self.cache = cache
        self.device = decoder.device
        self._slots: dict[int, int] = {}
        self._free_slots: list[int] = []
        # Newest token of each slot: input of a step that was planned before the token was known.
        self._newest = torch.zeros(64, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingResult:
        """Launch a step. Steps run in the order of these calls."""
        if self._threads is not None:
            self._threads.use_for(plan.num_tokens)
        self._release(plan.released)
        if plan.copies:
            self.backend.copy_blocks(plan.copies)
        token_ids, positions = self._inputs(plan)
        attention = self.backend.plan(self._attention_batch(plan, positions))
        hidden = self.decoder.forward(token_ids, torch.from_numpy(positions).to(self.device), attention)
        failures: dict[int, str] = {}
        sampled = self._sample(plan, hidden, failures)
        return PendingResult(sampled, self._prompt_logprobs(plan, hidden), failures)

    def close(self) -> None:
        """Let go of what lies on the device."""
        del self.decoder, self.backend, self.sampler

    def _inputs(self, plan: StepPlan) -> tuple[torch.Tensor, np.ndarray]:
        tokens = array("i")
        unknown_at: list[int] = []
        unknown_slots: list[int] = []
        positions = np.empty(plan.num_tokens, dtype=np.int64)
        at = 0
        for item in plan.scheduled:
            end = item.start + item.count
            positions[at : at + item.count] = np.arange(item.start, end)
            known = item.sequence.tokens[item.start : end]
            tokens += known
            if len(known) < item.count:
                tokens.append(0)
                unknown_at.append(at + len(known))
                unknown_slots.append(self._slots[item.sequence.key])
            at += item.count
        token_ids = torch.tensor(np.frombuffer(tokens, np.int32), dtype=torch.int64, device=self.device)
        if unknown_at:
            token_ids[unknown_at] = self._newest[unknown_slots]
        return token_ids, positions

    def _attention_batch(self, plan: StepPlan, positions: np.ndarray) -> AttentionBatch:
        tables = [np.frombuffer(self.cache.table(item.sequence.key), dtype=np.int32) for item in plan.scheduled]
        block_tables = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int32)
        for row, table in zip(block_tables, tables, strict=True):
            row[: len(table)] = table
        query_lens = np.array([item.count for item in plan.scheduled], dtype=np.int32)
        context_lens = np.array([item.start + item.count for item in plan.scheduled], dtype=np.int32)
        block_size = self.cache.block_size
        owners = np.repeat(np.arange(len(tables)), query_lens)
        blocks = block_tables[owners, positions // block_size].astype(np.int64)
        slot_mapping = blocks * block_size + positions % block_size
        return AttentionBatch(query_lens, context_lens, block_tables, slot_mapping)

    def _sample(self, plan: StepPlan, hidden: torch.Tensor, failures: dict[int, str]) -> SampledTokens | None:
        rows: list[int] = []
        slots: list[int] = []
        end = 0
        for item in plan.scheduled:
            end += item.count
            for sampler in item.samplers:
                rows.append(end - 1)
                slots.append(self._slot(sampler))
        if not rows:
            return None
        logits = self.decoder.compute_logits(hidden if rows == list(range(len(hidden))) else hidden[rows])
        sampled = self.sampler.sample(logits, slots, self._allowed(plan, failures))
        self._newest[slots] = sampled.token_ids
        return sampled

    def _allowed(self, plan: StepPlan, failures: dict[int, str]) -> Allowed | None:
        """What the grammars of the plan's samplers allow next. On a GPU the model still computes meanwhile."""
        samplers = [sampler for item in plan.scheduled for sampler in item.samplers]
        matchers = [(row, item.matcher) for row, item in enumerate(samplers) if item.matcher is not None]
        if not matchers:
            return None
        shape = len(matchers), mask_words(self.decoder.spec.vocab_size)
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for (row, matcher), mask in zip(matchers, bits.numpy(), strict=True):
            problem = matcher.fill(mask)
            if problem is not None:
                mask[:] = -1
                failures[row] = problem
        rows = send_ints([row for row, _ in matchers], self.device)
        return Allowed(rows, bits.to(self.device, non_blocking=True))

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        found = {}
        at = 0
        for position, item in enumerate(plan.scheduled):
            if item.sequence.wants_prompt_logprobs:
                found[position] = self._prompt_logprobs_of(item, hidden[at : at + item.count])
            at += item.count
        return found

    def _prompt_logprobs_of(self, item: ScheduledSequence, hidden: torch.Tensor) -> list[TokenLogprobs]:
        sequence = item.sequence
        targets = sequence.tokens[item.start + 1 : min(item.start + item.count + 1, sequence.num_prompt)]
        if not targets:
            return []
        logits = self.decoder.compute_logits(hidden[: len(targets)])
        count = sequence.request.params.prompt_logprobs or 0
        return prompt_logprobs(logits, torch.tensor(targets.tolist(), device=self.device), count)

    def _slot(self, sequence: Sequence) -> int:
        slot = self._slots.get(sequence.key)
        if slot is None:
            slot = self._free_slots.pop() if self._free_slots else len(self._slots)
            self._slots[sequence.key] = slot
            if slot >= len(self._newest):
                self._newest = torch.cat([self._newest, torch.zeros_like(self._newest)])
            request = sequence.request
            self.sampler.add(
                slot,
                request.params,
                sequence.seed,
                request.prompt_token_ids,
                sequence.tokens[sequence.num_prompt :],
                sequence.stop_token_ids,
                request.bad_words_token_ids,
            )
        return slot

    def _release(self, keys: list[int]) -> None:
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self.sampler.remove(slot)
                self._free_slots.append(slot)

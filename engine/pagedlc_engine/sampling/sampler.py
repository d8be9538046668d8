"""The sampler: state per slot, and the stages in their order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedlc_engine.errors import InvalidRequestError, PagedLCError
from pagedlc_engine.plan import BAD_LOGITS
from pagedlc_engine.request import SamplingParams, TokenLogprobs
from pagedlc_engine.sampling.draw import draw
from pagedlc_engine.sampling.filters import TopK, TopP, drop_below, top_k_cut, top_p_cut
from pagedlc_engine.sampling.history import TokenHistory
from pagedlc_engine.sampling.logprobs import listings, measure
from pagedlc_engine.sampling.masks import Allowed, add_bias, allow_only, ban_bad_words, ban_early_stop
from pagedlc_engine.sampling.penalties import Penalties, apply_penalties
from pagedlc_engine.sampling.plan import BatchPlan, RandomRows, SlotParams, make_plan
from pagedlc_engine.sampling.rng import signed64, uniform
from pagedlc_engine.sampling.rows import row_argmax, select
from pagedlc_engine.validation import bias_arrays

__all__ = ["SampledTokens", "Sampler", "SamplerKernels"]

NOTHING_ALLOWED = (
    "No token is left to sample: logit_bias, bad_words, min_tokens and structured_outputs together forbid the whole "
    "vocabulary. "
    "Allow at least one token."
)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row.

    Args:
        token_ids: int64 [S]; an arbitrary valid id where the row failed.
        bad_logits: Rows whose raw logits hold NaN or +inf, or are all -inf; bool [S].
        nothing_allowed: Rows whose every token is forbidden; bool [S].
        wanted: Rows with log-probabilities, and how many of the likeliest tokens each lists.
        measured: Of these rows, in this order, what :func:`pagedlc_engine.sampling.logprobs.measure` returned.
    """

    token_ids: Tensor
    bad_logits: Tensor
    nothing_allowed: Tensor
    wanted: dict[int, int]
    measured: Tensor | None

    def on_host(self) -> SampledTokens:
        """The same in the host's memory; on a GPU only queued, after all that is queued on the current stream."""
        return SampledTokens(
            _fetched(self.token_ids),
            _fetched(self.bad_logits),
            _fetched(self.nothing_allowed),
            self.wanted,
            None if self.measured is None else _fetched(self.measured),
        )

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Per row what was asked for; ``None`` where nothing was, or the row failed. Waits for the device."""
        result: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        if self.measured is not None:
            bad = self.bad_logits.tolist()
            for row, listing in zip(self.wanted, listings(self.measured, list(self.wanted.values())), strict=True):
                result[row] = None if bad[row] else listing
        return result

    def failures(self) -> dict[int, str]:
        """Rows without a usable token, and why. Waits for the device."""
        if not bool((self.bad_logits | self.nothing_allowed).any()):
            return {}
        failures = dict.fromkeys(self.nothing_allowed.nonzero()[:, 0].tolist(), NOTHING_ALLOWED)
        failures.update(dict.fromkeys(self.bad_logits.nonzero()[:, 0].tolist(), BAD_LOGITS))
        return failures


@dataclass(frozen=True, slots=True)
class SamplerKernels:
    """What stands for chains of torch operations where there are kernels.

    Args:
        choose_tokens: The stages from the temperature on, for all rows at once:
            :func:`pagedlc_engine.kernels.sampling.sample_tokens`.
        forbid_tokens: The grammar's stage: :func:`pagedlc_engine.kernels.sampler_stages.forbid_tokens`.
        penalise_tokens: The penalties: :func:`pagedlc_engine.kernels.sampler_stages.penalise_tokens`.
        record_tokens: What is kept of a step: :func:`pagedlc_engine.kernels.sampler_stages.record_tokens`.
        measure_tokens: Log-probabilities: :func:`pagedlc_engine.kernels.logprobs.measure_tokens`.
    """

    choose_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    forbid_tokens: Callable[[Tensor, Tensor, Tensor], None]
    penalise_tokens: Callable[[Tensor, Tensor, Penalties, TokenHistory], None]
    record_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, TokenHistory], tuple[Tensor, Tensor]]
    measure_tokens: Callable[[Tensor, Tensor, int], Tensor]


class Sampler:
    """Chooses the next token of every request in a batch.

    Requests sit in slots, small integers that are reused. The stages, in order: log-probabilities of the raw
    logits; logit bias; bans (``min_tokens``, ``bad_words``); penalties; grammar; temperature; min_p; top_k; top_p;
    draw. A stage runs only when some row of the batch needs it: a greedy batch is an argmax.

    A row's token depends on its own logits, parameters, seed and number of tokens so far, and on nothing else.

    Args:
        vocab_size: V, the width of the logits.
        device: Where the logits will be.
        kernels: Used where they do what torch operations would do; ``None``: torch operations throughout.
    """

    def __init__(self, vocab_size: int, device: torch.device, kernels: SamplerKernels | None = None) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels
        self._requests: dict[int, SlotParams] = {}
        self._history = TokenHistory(vocab_size, device)
        self._output_lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self._planned_slots: list[int] | None = None
        self._plan: BatchPlan | None = None

    def add(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Collection[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Put a request into a slot, replacing what was there.

        Args:
            slot: From 0; state grows to the largest slot used.
            params: How to sample.
            seed: Any integer; its low 64 bits count.
            prompt_token_ids: At least one.
            output_token_ids: Tokens generated so far: empty for a new request, not for one that was preempted.
            stop_token_ids: Forbidden until ``params.min_tokens`` tokens are there.
            bad_words: ``params.bad_words`` as token sequences.

        Raises:
            InvalidRequestError: The prompt is empty or holds a token outside the vocabulary, or ``logit_bias`` names
                such a token or holds NaN or a number too large.
        """
        self.remove(slot)
        self._check_prompt(prompt_token_ids)
        bias = self._bias(params.logit_bias) if params.logit_bias else None
        request = SlotParams(
            params=params,
            seed=signed64(seed),
            stop_token_ids=sorted({token for token in stop_token_ids if self._in_vocabulary(token)}),
            bad_words=[word for word in bad_words if word and self._in_vocabulary(word[-1])],
            bias=bias,
        )
        if request.tracked:
            self._history.add(slot, prompt_token_ids, output_token_ids)
        self._requests[slot] = request
        self._grow(slot + 1)
        self._output_lengths[slot] = len(output_token_ids)

    def remove(self, slot: int) -> None:
        """Empty a slot; nothing happens when it is empty."""
        self._history.remove(slot)
        self._requests.pop(slot, None)
        self._planned_slots = None

    def sample(self, logits: Tensor, slots: Sequence[int], allowed: Allowed | None = None) -> SampledTokens:
        """Choose one token per row and count it as output of the row's slot.

        Args:
            logits: The model's raw logits, float32 [S, V]; left unchanged.
            slots: The slot of each row, all different.
            allowed: Rows under a grammar, and which tokens it allows.

        Raises:
            PagedLCError: A slot is empty, or the logits have another shape than S rows of the vocabulary.
        """
        if logits.shape != (len(slots), self._vocab_size):
            raise PagedLCError(
                f"Logits of shape {tuple(logits.shape)} do not fit {len(slots)} slots "
                f"and a vocabulary of {self._vocab_size}."
            )
        plan = self._plan_for(slots)
        edits = plan.edits_logits or allowed is not None
        edited = self._edit(logits, plan, allowed) if edits else logits
        maxima, token_ids = self._choose(edited, plan)
        raw_maxima = logits.amax(-1) if edits else maxima
        bad_logits, nothing_allowed = self._record(plan, token_ids, raw_maxima, maxima)
        return SampledTokens(
            token_ids=token_ids,
            bad_logits=bad_logits,
            nothing_allowed=nothing_allowed,
            wanted=plan.logprobs,
            measured=self._measured(logits, token_ids, plan),
        )

    def launch_kernels(self) -> None:
        """Launch each of the kernels on one row, to have them compiled before any request."""
        trial = Sampler(self._vocab_size, self._device, self._kernels)
        trial.add(0, SamplingParams(repetition_penalty=2.0, logprobs=1), 0, [0], [], [], [])
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        bits = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32, device=self._device)
        trial.sample(torch.zeros(1, self._vocab_size, device=self._device), [0], Allowed(row, bits))

    def _edit(self, logits: Tensor, plan: BatchPlan, allowed: Allowed | None) -> Tensor:
        """A copy of the logits with biases, bans, penalties and grammars applied."""
        raw, logits = logits, logits.clone()
        if plan.bias is not None:
            add_bias(logits, plan.bias)
        if plan.min_tokens is not None:
            ban_early_stop(logits, plan.min_tokens, self._output_lengths[plan.slots])
        if plan.bad_words is not None:
            words = plan.bad_words
            ban_bad_words(logits, words, self._history.tails(words.history_rows, words.prefixes.shape[1]))
        if plan.penalties is not None and self._kernels is not None:
            before = raw if plan.only_penalties else logits.clone()
            self._kernels.penalise_tokens(before, logits, plan.penalties, self._history)
        elif plan.penalties is not None:
            seen = self._history.seen(plan.penalties.history_rows)
            apply_penalties(logits, plan.penalties, seen, self._history.counts)
        if allowed is not None and self._kernels is not None:
            self._kernels.forbid_tokens(logits, allowed.rows, allowed.bits)
        elif allowed is not None:
            allow_only(logits, allowed)
        return logits

    def _choose(self, logits: Tensor, plan: BatchPlan) -> tuple[Tensor, Tensor]:
        """Maxima of the edited logits (float32 [S]) and tokens (int64 [S])."""
        if plan.draw is not None and self._kernels is not None:
            draw, counters = plan.draw, self._output_lengths[plan.slots]
            drawn = self._kernels.choose_tokens(logits, draw.temperatures, draw.seeds, counters, draw.filters)
            return logits.amax(-1), drawn
        maxima, token_ids = row_argmax(logits)
        for block in plan.random:
            drawn = self._draw(logits, maxima, block)
            token_ids = drawn if block.rows is None else token_ids.index_copy_(0, block.rows, drawn)
        return maxima, token_ids

    def _draw(self, logits: Tensor, maxima: Tensor, random: RandomRows) -> Tensor:
        """Tokens of a block of random rows, int64 [R]."""
        weights = select(logits, random.rows) - select(maxima, random.rows)[:, None]
        weights.div_(random.temperatures).exp_()
        if random.min_p is not None:
            drop_below(weights, random.min_p)
        if random.truncations:
            _truncate(weights, random.truncations)
        return draw(weights, uniform(random.seeds, self._output_lengths[random.slots]))

    def _record(self, plan: BatchPlan, token_ids: Tensor, raw_maxima: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the tokens; which rows have bad logits and in which nothing is allowed, bool [S] each."""
        if plan.draw is not None and self._kernels is not None:
            if plan.tracked is not None:
                self._history.make_room(plan.tracked.slots)
            rows, lengths = plan.draw.history_rows, self._output_lengths
            return self._kernels.record_tokens(token_ids, raw_maxima, maxima, plan.slots, rows, lengths, self._history)
        self._output_lengths[plan.slots] += 1
        if plan.tracked is not None:
            self._history.append(plan.tracked.slots, plan.tracked.history_rows, token_ids[plan.tracked.rows])
        bad_logits = ~raw_maxima.isfinite()
        return bad_logits, ~bad_logits & ~maxima.isfinite()

    def _measured(self, logits: Tensor, token_ids: Tensor, plan: BatchPlan) -> Tensor | None:
        if not plan.logprobs:
            return None
        rows = plan.logprob_rows
        measure_tokens = measure if self._kernels is None else self._kernels.measure_tokens
        return measure_tokens(select(logits, rows), select(token_ids, rows), max(plan.logprobs.values()))

    def _plan_for(self, slots: Sequence[int]) -> BatchPlan:
        """The batch's plan; the last one serves again while the slots and their requests stay the same."""
        wanted = list(slots)
        if self._plan is None or wanted != self._planned_slots:
            empty = [slot for slot in wanted if slot not in self._requests]
            if empty:
                raise PagedLCError(f"Slots {empty} hold no request: add() one before sampling.")
            requests = [self._requests[slot] for slot in wanted]
            at_once = self._kernels is not None
            self._plan = make_plan(wanted, requests, self._history, self._vocab_size, self._device, at_once)
            self._planned_slots = wanted
        return self._plan

    def _grow(self, slots: int) -> None:
        missing = slots - len(self._output_lengths)
        if missing > 0:
            more = self._output_lengths.new_zeros(max(missing, len(self._output_lengths)))
            self._output_lengths = torch.cat([self._output_lengths, more])

    def _in_vocabulary(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidRequestError("The prompt is empty: give at least one token.")
        for token in (min(prompt), max(prompt)):
            if not self._in_vocabulary(token):
                raise InvalidRequestError(
                    f"The prompt holds token {token}, but the model's tokens are 0 to {self._vocab_size - 1}."
                )

    def _bias(self, bias: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        ids, values = bias_arrays(bias, self._vocab_size)
        return (
            torch.from_numpy(ids).to(self._device, torch.int64),
            torch.from_numpy(values).to(torch.float32).to(self._device),
        )


def _truncate(weights: Tensor, groups: Sequence[TopK | TopP]) -> None:
    """Apply top_k and top_p to weights (float32 [R, V]), in place."""
    cut = torch.zeros_like(weights[:, :1])
    for group in groups:
        part = select(weights, group.rows)
        part_cut = top_k_cut(part, group) if isinstance(group, TopK) else top_p_cut(part, group.top_p)
        cut = part_cut if group.rows is None else cut.index_copy_(0, group.rows, part_cut)
    drop_below(weights, cut)


def _fetched(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

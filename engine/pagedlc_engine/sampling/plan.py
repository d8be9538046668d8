"""A batch's sampling parameters as tensors, made once and used as long as the same slots are sampled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedlc_engine.request import SamplingParams
from pagedlc_engine.sampling.filters import MOST_CANDIDATES, TopK, TopP
from pagedlc_engine.sampling.history import TokenHistory
from pagedlc_engine.sampling.masks import BadWords, Bias, MinTokens
from pagedlc_engine.sampling.penalties import Penalties

__all__ = [
    "BatchPlan",
    "DrawSettings",
    "RandomRows",
    "SlotParams",
    "TrackedRows",
    "draw_filters",
    "draw_temperature",
    "make_plan",
]

# Below this temperature logits would be divided by next to nothing; the likeliest token is taken instead.
_LEAST_TEMPERATURE = 1e-5

# A top_k beyond every vocabulary; as large as float32 holds exactly.
_ALL_TOKENS = 1 << 24

# Rows are drawn in blocks of about this many logits: temporaries that stay in a CPU's cache halve the time.
_ELEMENTS_AT_ONCE = 1 << 19

# Beyond this range penalised logits would overflow.
_REPETITION_RANGE = (1e-6, 1e6)


def draw_temperature(params: SamplingParams) -> float:
    """What logits are divided by; 0 where the likeliest token is taken."""
    return 0.0 if params.temperature < _LEAST_TEMPERATURE or params.top_k == 1 else params.temperature


def draw_filters(params: SamplingParams) -> tuple[float, float, float]:
    """top_k, top_p and min_p as the sampling kernels take them, in float32."""
    return min(params.top_k, _ALL_TOKENS), params.top_p, params.min_p


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What a slot's request asks of the sampler; ids outside the vocabulary are already left out.

    Args:
        params: The request's parameters.
        seed: As an int64 value.
        stop_token_ids: Forbidden before ``params.min_tokens``.
        bad_words: Token sequences, none empty.
        bias: Of ``params.logit_bias``, token ids (int64 [E]) and values (float32 [E]), on the logits' device.
    """

    params: SamplingParams
    seed: int
    stop_token_ids: Collection[int]
    bad_words: Sequence[Sequence[int]]
    bias: tuple[Tensor, Tensor] | None = None

    @property
    def random(self) -> bool:
        """Tokens are drawn; otherwise the likeliest is taken."""
        return draw_temperature(self.params) > 0.0

    @property
    def penalises(self) -> bool:
        """Repeated tokens become less (or more) likely."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    @property
    def tracked(self) -> bool:
        """The tokens seen so far matter."""
        return self.penalises or bool(self.bad_words)


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows whose token is drawn, together.

    Args:
        rows: Rows in the batch, int64 [R]; ``None`` means all.
        slots: int64 [R].
        seeds: int64 [R].
        temperatures: float32 [R, 1].
        min_p: float32 [R, 1], or ``None`` when no row has one.
        truncations: Groups of rows with top_k or top_p; a row is in one at most.
    """

    rows: Tensor | None
    slots: Tensor
    seeds: Tensor
    temperatures: Tensor
    min_p: Tensor | None
    truncations: Sequence[TopK | TopP]


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """What one call for all rows of a batch asks for, as :func:`pagedlc_engine.kernels.sampling.sample_tokens` does.

    Args:
        temperatures: 0 where the likeliest token is taken, float32 [S].
        seeds: int64 [S].
        filters: top_k, top_p and min_p, float32 [S, 3].
        history_rows: Each row's row in the token history, or -1, int64 [S].
    """

    temperatures: Tensor
    seeds: Tensor
    filters: Tensor
    history_rows: Tensor


@dataclass(frozen=True, slots=True)
class TrackedRows:
    """The rows whose tokens are kept in the history.

    Args:
        slots: Their slots.
        rows: Rows in the batch, int64 [R].
        history_rows: Rows in the history, int64 [R].
    """

    slots: list[int]
    rows: Tensor
    history_rows: Tensor


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Stages that at least one row needs; those that are ``None`` or empty are skipped.

    Args:
        slots: int64 [S].
        bias, min_tokens, bad_words, penalties: Stages that edit logits.
        random: Rows to draw, in blocks; empty where ``draw`` stands for them.
        draw: How the tokens of all rows are drawn at once, or ``None``.
        tracked: Rows whose tokens are kept.
        logprobs: Row in the batch to the number of likeliest tokens it lists.
        logprob_rows: These rows, int64 [R]; ``None`` means all.
    """

    slots: Tensor
    bias: Bias | None
    min_tokens: MinTokens | None
    bad_words: BadWords | None
    penalties: Penalties | None
    random: Sequence[RandomRows]
    draw: DrawSettings | None
    tracked: TrackedRows | None
    logprobs: dict[int, int]
    logprob_rows: Tensor | None

    @property
    def only_penalties(self) -> bool:
        """Nothing changes logits before the penalties do."""
        return self.bias is None and self.min_tokens is None and self.bad_words is None

    @property
    def edits_logits(self) -> bool:
        """Some stage changes logits in place."""
        stages = (self.bias, self.min_tokens, self.bad_words, self.penalties)
        return any(stage is not None for stage in stages)


def make_plan(
    slots: Sequence[int],
    requests: Sequence[SlotParams],
    history: TokenHistory,
    vocab_size: int,
    device: torch.device,
    draw_at_once: bool,
) -> BatchPlan:
    """The plan for a batch: ``requests[i]`` sits in ``slots[i]`` and is row ``i``."""
    return _Planner(slots, requests, history, vocab_size, device).plan(draw_at_once)


class _Planner:
    def __init__(
        self,
        slots: Sequence[int],
        requests: Sequence[SlotParams],
        history: TokenHistory,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._slots = slots
        self._requests = requests
        self._history = history
        self._vocab_size = vocab_size
        self._device = device

    def plan(self, draw_at_once: bool) -> BatchPlan:
        logprobs = {
            row: request.params.logprobs
            for row, request in enumerate(self._requests)
            if request.params.logprobs is not None
        }
        return BatchPlan(
            slots=self._ints(self._slots),
            bias=self._bias(),
            min_tokens=self._min_tokens(),
            bad_words=self._bad_words(),
            penalties=self._penalties(),
            random=[] if draw_at_once else self._random(),
            draw=self._draw() if draw_at_once else None,
            tracked=self._tracked(),
            logprobs=logprobs,
            logprob_rows=self._subset(list(logprobs), len(self._slots)),
        )

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _history_rows(self, rows: Sequence[int]) -> Tensor:
        return self._ints([self._history.row(self._slots[row]) for row in rows])

    def _bias(self) -> Bias | None:
        found = {row: request.bias for row, request in enumerate(self._requests) if request.bias is not None}
        if not found:
            return None
        ids, values = zip(*found.values(), strict=True)
        total = sum(map(len, ids))
        rows = self._ints(list(found)).repeat_interleave(self._ints([len(part) for part in ids]), output_size=total)
        return Bias(rows, torch.cat(ids), torch.cat(values))

    def _min_tokens(self) -> MinTokens | None:
        entries = [
            (row, token, request.params.min_tokens)
            for row, request in enumerate(self._requests)
            if request.params.min_tokens
            for token in request.stop_token_ids
        ]
        if not entries:
            return None
        rows, ids, minimum = zip(*entries, strict=True)
        return MinTokens(self._ints(rows), self._ints(ids), self._ints(minimum))

    def _bad_words(self) -> BadWords | None:
        entries = [(row, list(word)) for row, request in enumerate(self._requests) for word in request.bad_words]
        if not entries:
            return None
        width = max(len(word) for _, word in entries) - 1
        prefixes = [token for _, word in entries for token in [-1] * (width - len(word) + 1) + word[:-1]]
        rows = [row for row, _ in entries]
        return BadWords(
            rows=self._ints(rows),
            history_rows=self._history_rows(rows),
            prefixes=self._ints(prefixes).view(len(entries), width),
            ids=self._ints([word[-1] for _, word in entries]),
        )

    def _penalties(self) -> Penalties | None:
        rows = [row for row, request in enumerate(self._requests) if request.penalises]
        if not rows:
            return None
        params = [self._requests[row].params for row in rows]
        return Penalties(
            rows=self._ints(rows),
            history_rows=self._history_rows(rows),
            repetition=self._floats([p.repetition_penalty for p in params]).clamp_(*_REPETITION_RANGE)[:, None],
            frequency=self._floats([p.frequency_penalty for p in params])[:, None],
            presence=self._floats([p.presence_penalty for p in params])[:, None],
        )

    def _tracked(self) -> TrackedRows | None:
        rows = [row for row, request in enumerate(self._requests) if request.tracked]
        if not rows:
            return None
        return TrackedRows([self._slots[row] for row in rows], self._ints(rows), self._history_rows(rows))

    def _draw(self) -> DrawSettings:
        params = [request.params for request in self._requests]
        return DrawSettings(
            temperatures=self._floats([draw_temperature(p) for p in params]),
            seeds=self._ints([request.seed for request in self._requests]),
            filters=torch.tensor([draw_filters(p) for p in params], dtype=torch.float32, device=self._device),
            history_rows=self._ints(
                [
                    self._history.row(slot) if request.tracked else -1
                    for slot, request in zip(self._slots, self._requests, strict=True)
                ]
            ),
        )

    def _random(self) -> list[RandomRows]:
        rows = [row for row, request in enumerate(self._requests) if request.random]
        size = max(1, _ELEMENTS_AT_ONCE // self._vocab_size)
        return [self._random_block(rows[start : start + size]) for start in range(0, len(rows), size)]

    def _random_block(self, rows: Sequence[int]) -> RandomRows:
        params = [self._requests[row].params for row in rows]
        min_p = [p.min_p for p in params]
        return RandomRows(
            rows=self._subset(rows, len(self._slots)),
            slots=self._ints([self._slots[row] for row in rows]),
            seeds=self._ints([self._requests[row].seed for row in rows]),
            temperatures=self._floats([p.temperature for p in params])[:, None],
            min_p=self._floats(min_p)[:, None] if any(min_p) else None,
            truncations=self._truncations(params),
        )

    def _truncations(self, params: Sequence[SamplingParams]) -> list[TopK | TopP]:
        few: list[int] = []
        many: list[int] = []
        nucleus: list[int] = []
        for row, p in enumerate(params):
            if 0 < p.top_k < self._vocab_size:
                (few if p.top_k <= MOST_CANDIDATES else many).append(row)
            elif p.top_p < 1.0:
                nucleus.append(row)
        groups: list[TopK | TopP] = [self._top_k(rows, params) for rows in (few, many) if rows]
        if nucleus:
            groups.append(TopP(self._subset(nucleus, len(params)), self._top_p([params[row] for row in nucleus])))
        return groups

    def _top_k(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> TopK:
        chosen = [params[row] for row in rows]
        return TopK(
            rows=self._subset(rows, len(params)),
            top_k=self._ints([p.top_k for p in chosen])[:, None],
            width=max(p.top_k for p in chosen),
            top_p=self._top_p(chosen) if any(p.top_p < 1.0 for p in chosen) else None,
        )

    def _top_p(self, params: Sequence[SamplingParams]) -> Tensor:
        return torch.tensor([p.top_p for p in params], dtype=torch.float64, device=self._device)[:, None]

    def _subset(self, rows: Sequence[int], total: int) -> Tensor | None:
        """Indices of ``rows``, or ``None`` when they are all there are."""
        return self._ints(rows) if len(rows) < total else None

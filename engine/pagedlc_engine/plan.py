"""What one step computes: the scheduler's word to the runner, and the runner's answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedlc_engine.request import TokenLogprobs
from pagedlc_engine.sequence import Sequence

__all__ = ["BAD_LOGITS", "ScheduledSequence", "StepPlan", "StepResult"]

#: The one reason for a missing token that is not the request's.
BAD_LOGITS = "The model's logits for this request are not finite numbers; its weights or its dtype may be at fault."


@dataclass(slots=True)
class ScheduledSequence:
    """``count`` tokens of a sequence from position ``start`` on.

    ``samplers`` are the sequences that each draw a next token from the logits of the last position: none in
    the middle of a prompt, the sequence itself, or it and its forks.
    """

    sequence: Sequence
    start: int
    count: int
    samplers: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """All that one step computes.

    Args:
        scheduled: The sequences and their tokens.
        copies: (source, destination) blocks to copy before anything is written.
        released: Keys of sequences that finished since the last plan.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.count for item in self.scheduled)


@dataclass(slots=True)
class StepResult:
    """Sampled tokens, one per sampler in the plan's order.

    Args:
        token_ids: The tokens.
        logprobs: Per sampler, ``None`` where not asked for.
        prompt_logprobs: Per scheduled sequence (by position in the plan), for the prompt tokens after each
            computed position.
        failures: Positions in ``token_ids`` that got no usable token, and why.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

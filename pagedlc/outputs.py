"""What a generation gives back. Attribute names are vLLM's."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from pagedlc_engine.request import RequestTimings, TokenLogprobs

__all__ = ["CompletionChunk", "CompletionOutput", "FinishReason", "RequestOutput", "Timings"]

#: Why an answer ended: ``stop`` (end-of-sequence, stop token or stop string), ``length``, or ``abort``.
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Timings:
    """How long things took, in seconds; ``None`` where they have not happened.

    Args:
        queue_time: From submission to the first step.
        time_to_first_token: From submission to the first token.
        time_per_output_token: Mean time between tokens after the first.
        total_time: From submission to the last token.
    """

    queue_time: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    total_time: float | None = None

    @classmethod
    def of(cls, raw: RequestTimings, num_tokens: int, complete: bool) -> Timings:
        """Durations from the engine's clock readings.

        Args:
            raw: The readings.
            num_tokens: Tokens of the answer so far.
            complete: The answer is complete, even if the engine has not noticed yet (a stop string was found).
        """
        finished = raw.finished
        if finished is None and complete:
            finished = time.monotonic()
        per_token = None
        if raw.first_token is not None and finished is not None and num_tokens > 1:
            per_token = (finished - raw.first_token) / (num_tokens - 1)
        return cls(
            queue_time=_since(raw.arrival, raw.scheduled),
            time_to_first_token=_since(raw.arrival, raw.first_token),
            time_per_output_token=per_token,
            total_time=_since(raw.arrival, finished),
        )


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """A piece of a streamed answer.

    Args:
        request_id: The request, as :meth:`pagedlc.LLM.abort` takes it.
        index: Which of the request's ``n`` answers.
        text: New text; may be empty while a character or a possible stop string is incomplete.
        token_ids: New tokens.
        logprobs: One entry per new token when asked for.
        finish_reason: Set on the answer's last chunk.
        stop_reason: The stop string or stop token id that ended it.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: How many of them came from the prefix cache.
        num_generated_tokens: Tokens of the answer so far.
        timings: Final on the last chunk.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timings: Timings


@dataclass(slots=True)
class CompletionOutput:
    """One finished answer.

    Args:
        index: Which of the request's ``n`` answers.
        text: The answer.
        token_ids: Its tokens, the end-of-sequence token included.
        cumulative_logprob: Sum of the tokens' log-probabilities, when ``logprobs`` was asked for.
        logprobs: One entry per token when asked for.
        finish_reason: Why it ended.
        stop_reason: The stop string or stop token id that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request.

    Args:
        request_id: Its id.
        prompt: The prompt's text, if it was given as text.
        prompt_token_ids: The prompt's tokens.
        prompt_logprobs: ``None`` for the first token, then one entry per prompt token, when asked for.
        outputs: Its ``n`` answers.
        finished: True when all answers are complete.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        timings: How long things took, for the first answer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    timings: Timings

"""What goes into the engine and what comes out: plain, picklable messages.

Nothing here knows the scheduler, tensors or text. ``stop`` and ``bad_words`` are carried as text for the
layer that owns the tokenizer; the engine itself only looks at token ids.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pagedlc_engine.config import check_option_names, validation_message
from pagedlc_engine.errors import ConfigError, InvalidRequestError, PagedLCError
from pagedlc_engine.grammar.spec import StructuredOutputsParams

__all__ = [
    "FinishReason",
    "Logprob",
    "Request",
    "RequestTimings",
    "SamplingParams",
    "TokenDelta",
    "TokenLogprobs",
    "pack_token_ids",
    "token_array",
]

#: ``stop``: a stop token, stop string or end-of-sequence; ``length``: ``max_tokens`` or ``max_model_len``
#: reached; ``abort``: given up by the caller; ``error``: see ``TokenDelta.error``.
FinishReason = Literal["stop", "length", "abort", "error"]

#: What sampling parameters are called elsewhere, and in older versions of vLLM.
_OTHER_NAMES = {
    "best_of": "n",
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
    "stop_sequences": "stop",
}
MAX_LOGPROBS = 50
MAX_N = 128


class SamplingParams(BaseModel):
    """How to choose the next tokens. Names and meanings are vLLM's, and so are the defaults but that of ``max_tokens``.

    Args:
        n: Answers per prompt; they share the prompt's KV blocks.
        max_tokens: Most tokens to generate; ``None`` goes to the end of the context. (vLLM's default of 16 would cut
            most answers.)
        min_tokens: No end-of-sequence or stop token before this many tokens, and no stop string counts.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least this.
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest.
        presence_penalty: Subtracted once from each token already generated.
        frequency_penalty: Subtracted per occurrence in the generated tokens.
        repetition_penalty: Divides (or multiplies, when negative) the logits of tokens seen in prompt or answer.
        seed: Makes sampling repeatable, whatever else is in the batch; answer ``i`` of ``n`` adds ``i``.
        stop: Strings that end the answer; not part of it unless ``include_stop_str_in_output``.
        stop_token_ids: Token ids that end the answer.
        ignore_eos: Go on after end-of-sequence.
        logprobs: Log-probabilities of the chosen and the k likeliest tokens, per generated token.
        prompt_logprobs: The same for each prompt token after the first.
        logit_bias: Token id to a value added to its logit.
        bad_words: Strings that must not be generated.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string (or stop token's text) in the text.
        structured_outputs: What the answer must look like: :class:`StructuredOutputsParams`, or a dict of its fields.
            Every answer that ends by itself keeps to it, whatever the other parameters are; one that ``max_tokens``
            (or a stop string or stop token) cuts off is the beginning of such an answer.

    Raises:
        InvalidRequestError: A value is out of range, or a parameter is unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(default=1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(default=512, ge=1)
    min_tokens: int = Field(default=0, ge=0, le=2**31 - 1)
    temperature: float = Field(default=1.0, ge=0.0, le=1e6, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __init__(self, **values: Any) -> None:
        try:
            check_option_names(values, type(self).model_fields, _OTHER_NAMES)
            super().__init__(**values)
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from None
        except ValidationError as error:
            raise InvalidRequestError(validation_message("sampling parameter", error)) from None

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_or_many(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _structured_outputs_as_dict(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        check_option_names(value, [field.name for field in fields(StructuredOutputsParams)])
        return StructuredOutputsParams(**value)

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("must not contain an empty string")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        return self

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with ``changes`` applied and validated."""
        return SamplingParams(**{**self.model_dump(exclude_unset=True), **changes})


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way into the engine.

    Args:
        request_id: Unique among the engine's live requests.
        prompt_token_ids: At least one token id; :func:`token_array` makes the form that is cheap to pass on.
        params: How to sample.
        eos_token_ids: End-of-sequence ids of the model (ignored under ``params.ignore_eos``).
        bad_words_token_ids: ``params.bad_words`` as token sequences.
        priority: Smaller runs first; equal priorities run in order of arrival.
        cache_salt: Requests share cached blocks only with requests of the same salt.
        extra_keys: What else the KV contents depend on (adapter, media), part of every block's key.
        arrival_time: ``time.monotonic()`` at submission, in seconds.
        block_hashes: Hash chain over the prompt's full blocks (see ``kv.hashing``); filled in by the client.
        whole: Hand each answer over in one piece when it is finished, not token by token.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    extra_keys: tuple[str, ...] = ()
    arrival_time: float = 0.0
    block_hashes: tuple[bytes, ...] = ()
    whole: bool = False


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Token ids as C ints: a long prompt is checked, hashed and copied many times on its way.

    Raises:
        InvalidRequestError: Something else than integers of 32 bits is among them.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    try:
        return pack_token_ids(tuple(token_ids))
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(f"Token ids must be whole numbers of at most 32 bits: {error}.") from None


def pack_token_ids(token_ids: Sequence[int]) -> array[int]:
    """``array("i", token_ids)``, errors included, in half of its time."""
    try:
        return array("i", struct.pack(f"{len(token_ids)}i", *token_ids))
    except struct.error:
        return array("i", token_ids)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token and its rank (1 is the likeliest)."""

    logprob: float
    rank: int


#: One position: token id to its log-probability; the chosen token comes first, then the likeliest.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class RequestTimings:
    """Seconds on the ``time.monotonic()`` clock; ``None`` where it has not happened yet."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def copy(self) -> RequestTimings:
        """As they are now."""
        return RequestTimings(self.arrival, self.scheduled, self.first_token, self.finished)


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one answer, as the engine's loop hands them over.

    Args:
        request_id: The request.
        index: Which of its ``n`` answers.
        token_ids: Tokens added since the last delta of this answer (may be empty at the end). A stop token
            that ended the answer is included as the last one.
        logprobs: One entry per token of ``token_ids`` when asked for.
        finish_reason: Set on the answer's last delta.
        stop_reason: The stop token id that ended it, if one did.
        prompt_logprobs: On the request's first delta when asked for: ``None`` for the first token, then one
            entry per prompt token.
        num_cached_tokens: Prompt tokens served from the prefix cache.
        timings: When things happened; final on the last delta.
        error: Set with ``finish_reason="error"``.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    timings: RequestTimings = field(default_factory=lambda: RequestTimings(0.0))
    error: PagedLCError | None = None

    def under(self, request_id: str) -> TokenDelta:
        """The same for another name of the request. Written out: :func:`dataclasses.replace` takes twice the time."""
        return TokenDelta(
            request_id,
            self.index,
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
            self.prompt_logprobs,
            self.num_cached_tokens,
            self.timings,
            self.error,
        )

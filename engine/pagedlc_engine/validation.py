"""What is checked about a request before it comes near the model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from pagedlc_engine.errors import InvalidRequestError, PromptTooLongError
from pagedlc_engine.request import Request, token_array

__all__ = ["GREATEST_BIAS", "check_request"]

#: Far beyond any logit, and far from overflow in float32.
GREATEST_BIAS = 1e30


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Check token ids and lengths against the model.

    Args:
        request: The request.
        vocab_size: Token ids must be below this.
        max_model_len: Prompt and answer together must not be longer; one token of answer must fit.

    Raises:
        InvalidRequestError: The prompt is empty, a token id is not in the vocabulary, or a field has a wrong type.
        PromptTooLongError: The prompt leaves no room for an answer.
    """
    _check_types(request)
    count = len(request.prompt_token_ids)
    if count == 0:
        raise InvalidRequestError("The prompt is empty: it must have at least one token.")
    if count >= max_model_len:
        raise PromptTooLongError(
            f"The prompt has {count} tokens, but at most {max_model_len - 1} leave room for an answer "
            f"(max_model_len is {max_model_len}). Shorten it, or raise max_model_len or the KV cache's memory if the "
            "model allows."
        )
    _check_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    _check_ids("stop_token_ids", request.params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", request.params.logit_bias or (), vocab_size)
    for token, bias in (request.params.logit_bias or {}).items():
        if not -math.inf <= bias <= GREATEST_BIAS:
            raise InvalidRequestError(
                f"logit_bias for token {token} is {bias}: use at most {GREATEST_BIAS:g}, or -inf to ban it."
            )
    for word in request.bad_words_token_ids:
        _check_ids("bad_words", word, vocab_size)


def _check_types(request: Request) -> None:
    if not isinstance(request.request_id, str):
        raise InvalidRequestError(f"request_id must be a string, not {request.request_id!r}.")
    if not isinstance(request.priority, int):
        raise InvalidRequestError(f"priority must be a whole number, not {request.priority!r}.")
    if not isinstance(request.cache_salt, str | None):
        raise InvalidRequestError(f"cache_salt must be a string or None, not {request.cache_salt!r}.")


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    ids = np.frombuffer(token_array(token_ids), np.int32)
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequestError(f"{name}: token id {bad} is not in the model's vocabulary (0 to {vocab_size - 1}).")

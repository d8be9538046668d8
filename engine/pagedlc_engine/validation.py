"""What is checked about a request before it comes near the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from pagedlc_engine.errors import InvalidRequestError, PromptTooLongError
from pagedlc_engine.request import Request, token_array

__all__ = ["GREATEST_BIAS", "bias_arrays", "check_request", "too_long"]

#: Far beyond any logit, and far from overflow in float32.
GREATEST_BIAS = 1e30


def check_request(request: Request, vocab_size: int, max_model_len: int, model_limit: int | None = None) -> None:
    """Check token ids and lengths against the model.

    Args:
        request: The request.
        vocab_size: Token ids must be below this.
        max_model_len: Prompt and answer together must not be longer; one token of answer must fit.
        model_limit: The longest that the model itself allows, where that is known; for the error's advice.

    Raises:
        InvalidRequestError: The prompt is empty, a token id is not in the vocabulary, or a field has a wrong type.
        PromptTooLongError: The prompt leaves no room for an answer.
    """
    _check_types(request)
    count = len(request.prompt_token_ids)
    if count == 0:
        raise InvalidRequestError("The prompt is empty: it must have at least one token.")
    if count >= max_model_len:
        raise too_long(f"{count} tokens", max_model_len, model_limit)
    _check_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    if request.params.stop_token_ids:
        _check_ids("stop_token_ids", request.params.stop_token_ids, vocab_size)
    if request.params.logit_bias:
        bias_arrays(request.params.logit_bias, vocab_size)
    for word in request.bad_words_token_ids:
        _check_ids("bad_words", word, vocab_size)


def too_long(length: str, max_model_len: int, model_limit: int | None = None) -> PromptTooLongError:
    """The error of a prompt of this length; of what may be raised it says only what the model allows."""
    if model_limit is None:
        advice = "Shorten it, or raise max_model_len or the KV cache's memory if the model allows."
    elif max_model_len < model_limit:
        advice = f"Shorten it, or raise max_model_len (to at most {model_limit}) or the KV cache's memory."
    else:
        advice = "Shorten it: the model was made for no more."
    return PromptTooLongError(
        f"The prompt has {length}, but at most {max_model_len - 1} tokens leave room for an answer "
        f"(max_model_len is {max_model_len}). {advice}"
    )


def bias_arrays(bias: Mapping[int, float], vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """``logit_bias`` as token ids and their values, [E] each. It may name the whole vocabulary.

    Raises:
        InvalidRequestError: A token is not in the vocabulary, or a value is NaN or too large.
    """
    ids = _check_ids("logit_bias", bias, vocab_size)
    values = np.fromiter(bias.values(), np.float64, len(bias))
    wrong = np.flatnonzero(~((values >= -math.inf) & (values <= GREATEST_BIAS)))
    if len(wrong):
        raise InvalidRequestError(
            f"logit_bias for token {ids[wrong[0]]} is {values[wrong[0]]}: use at most {GREATEST_BIAS:g}, or -inf to "
            "ban it."
        )
    return ids, values


def _check_types(request: Request) -> None:
    if not isinstance(request.request_id, str):
        raise InvalidRequestError(f"request_id must be a string, not {request.request_id!r}.")
    if not isinstance(request.priority, int):
        raise InvalidRequestError(f"priority must be a whole number, not {request.priority!r}.")
    if not isinstance(request.cache_salt, str | None):
        raise InvalidRequestError(f"cache_salt must be a string or None, not {request.cache_salt!r}.")


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    try:
        ids = np.frombuffer(token_array(token_ids), np.int32)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}") from None
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidRequestError(f"{name}: token id {bad} is not in the model's vocabulary (0 to {vocab_size - 1}).")
    return ids

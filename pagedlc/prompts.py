"""From what a user passes as prompts to the engine's requests; everything wrong with them is found here."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol, TypeAlias, TypeVar

from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.errors import InvalidRequestError
from pagedlc_engine.request import Request, SamplingParams, pack_token_ids
from pagedlc_engine.validation import too_long

__all__ = ["PreparedRequest", "Prompt", "are_long", "as_prompts", "check_text_length", "each", "pair_params", "prepare"]

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

#: Tokenizing as many characters takes a millisecond or two: longer than asking a thread to do it.
_LONG_TEXT = 8192
#: Up to so many characters for each token of the context, texts are tokenized as quickly as their least number of
#: tokens is found the first time; and hardly a vocabulary's longest token is shorter.
_SHORT_FOR_CONTEXT = 16


class TokenArray(Protocol):
    """Token ids in a NumPy array, a tensor or the like, with one dimension."""

    def tolist(self) -> Any:
        """The numbers as Python's own."""
        ...


#: Text, token ids, or ``{"prompt_token_ids": [...]}`` (also ``{"prompt": "text"}``, as vLLM takes it).
Prompt: TypeAlias = str | Sequence[int] | TokenArray | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, its prompt's text if it was given as text, and its prompt's tokens as the caller gets them back."""

    request: Request
    text: str | None
    token_ids: list[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list.

    Raises:
        InvalidRequestError: It is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = _unpacked(prompts)
    if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray):
        raise InvalidRequestError(_not_a_prompt(prompts))
    if items and isinstance(items[0], float | bool):
        raise InvalidRequestError(_not_a_prompt(prompts))
    return [items] if items and _is_int(items[0]) else list(items)


def pair_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Sampling parameters for each of ``count`` prompts.

    Raises:
        InvalidRequestError: A list of another length, or something else.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise InvalidRequestError(f"sampling_params must be SamplingParams or a list of them, not {params!r}.")
    if len(params) != count:
        raise InvalidRequestError(f"{count} prompts, but {len(params)} sampling parameters: give one, or one for each.")
    return list(params)


def each(what: str, items: Sequence[_Item], make: Callable[[_Item], _Made]) -> list[_Made]:
    """``make`` of every item; of several, an error names the wrong one."""
    made = []
    for position, item in enumerate(items):
        try:
            made.append(make(item))
        except InvalidRequestError as error:
            if len(items) == 1:
                raise
            raise type(error)(f"{what} {position}: {error}") from error
    return made


def prepare(
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    model_limit: int | None = None,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
) -> PreparedRequest:
    """Tokenize a prompt and make it a request.

    Raises:
        InvalidRequestError: The prompt is empty or no prompt at all.
        PromptTooLongError: It is a text for which :func:`check_text_length` finds no room in ``max_model_len`` tokens.
    """
    text, token_ids, packed = _tokenize(prompt, tokenizer, max_model_len, model_limit)
    request = Request(
        request_id=request_id or uuid.uuid4().hex,
        prompt_token_ids=packed,
        params=params,
        eos_token_ids=tokenizer.eos_token_ids,
        bad_words_token_ids=tokenizer.encode_bad_words(params.bad_words),
        priority=priority,
        cache_salt=cache_salt,
    )
    return PreparedRequest(request, text, token_ids)


def are_long(prompts: Sequence[Prompt]) -> bool:
    """Whether there is so much text that an event loop should not wait while it is tokenized."""
    texts = (prompt.get("prompt") if isinstance(prompt, Mapping) else prompt for prompt in prompts)
    return sum(len(text) for text in texts if isinstance(text, str)) > _LONG_TEXT


def check_text_length(text: str, tokenizer: Tokenizer, max_model_len: int, model_limit: int | None = None) -> None:
    """Refuse a text that is far too long before a second is spent on tokenizing it.

    Raises:
        PromptTooLongError: It has at least ``max_model_len`` tokens, however it is cut.
    """
    if len(text) > _SHORT_FOR_CONTEXT * max_model_len:
        fewest = tokenizer.fewest_tokens(text)
        if fewest >= max_model_len:
            raise too_long(f"{len(text)} characters, which are {fewest} tokens or more", max_model_len, model_limit)


def _tokenize(
    prompt: Prompt, tokenizer: Tokenizer, max_model_len: int, model_limit: int | None
) -> tuple[str | None, list[int], array[int]]:
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return None, *_token_ids(prompt["prompt_token_ids"])
        if "prompt" in prompt and not isinstance(prompt["prompt"], Mapping):
            return _tokenize(prompt["prompt"], tokenizer, max_model_len, model_limit)
        hint = " Messages go to chat()." if "role" in prompt else ""
        raise InvalidRequestError(
            f"A prompt given as a dict needs 'prompt' or 'prompt_token_ids', not {sorted(map(str, prompt))}.{hint}"
        )
    if isinstance(prompt, str):
        check_text_length(prompt, tokenizer, max_model_len, model_limit)
        token_ids = tokenizer.encode(prompt)
        if not token_ids:
            raise InvalidRequestError("The prompt is empty: it must have at least one token.")
        return prompt, token_ids, pack_token_ids(token_ids)
    return None, *_token_ids(prompt)


def _token_ids(given: object) -> tuple[list[int], array[int]]:
    """The tokens twice: as Python's numbers, and packed."""
    items = _unpacked(given)
    if not isinstance(items, Sequence) or isinstance(items, str | bytes | bytearray):
        raise InvalidRequestError(_not_a_prompt(given))
    if not items:
        raise InvalidRequestError("The prompt is empty: it must have at least one token.")
    if not _is_int(items[0]):
        raise InvalidRequestError(_not_a_prompt(given))
    try:
        packed = pack_token_ids(items)
    except TypeError:
        raise InvalidRequestError(_not_a_prompt(given)) from None
    except OverflowError:
        # The first that does not fit is at fault; what comes after it may be anything.
        large = next(item for item in items if not -(2**31) <= index(item) < 2**31)
        raise InvalidRequestError(f"Token ids have at most 32 bits; {large} has more.") from None
    # Making new numbers takes ten times as long.
    return list(items) if type(items[0]) is int else packed.tolist(), packed


def _unpacked(given: Any) -> Any:
    """What NumPy arrays, tensors and the like hold, as lists; everything else as it is."""
    return given.tolist() if hasattr(given, "tolist") and not isinstance(given, array) else given


def _is_int(item: object) -> bool:
    # Arrays and tensors have __index__ too, in case they hold one number.
    return hasattr(item, "__index__") and not isinstance(item, bool) and not getattr(item, "ndim", 0)


def _not_a_prompt(given: object) -> str:
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        shown = f"{type(given).__name__} of {given.dtype} with shape {tuple(given.shape)}"
    else:
        shown = repr(given)
    return (
        "A prompt is text, token ids (a list, or an array or tensor with one dimension), or {'prompt_token_ids': "
        f"[...]}}; this is none of them: {shown[:80]}{'...' if len(shown) > 80 else ''}"
    )

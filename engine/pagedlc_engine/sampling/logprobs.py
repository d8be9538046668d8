"""Log-probabilities of the model's own distribution, before any bias, penalty or temperature."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pagedlc_engine.request import Logprob, TokenLogprobs
from pagedlc_engine.sampling.rows import largest

__all__ = ["prompt_logprobs", "token_logprobs"]

# Rows of a prompt worked on at a time, so that temporaries stay a fraction of the logits themselves.
_ROWS_AT_ONCE = 64


def prompt_logprobs(logits: Tensor, target_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Log-probabilities of known next tokens.

    Args:
        logits: Raw logits at P positions, float32 [P, V].
        target_ids: The token that follows each position, int64 [P].
        k: How many of the likeliest tokens to list beside it.

    Returns:
        One mapping per position: the target first, then the ``k`` likeliest.
    """
    result: list[TokenLogprobs] = []
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        result += token_logprobs(logits[part], target_ids[part], [k] * len(logits[part]))
    return result


def token_logprobs(logits: Tensor, token_ids: Tensor, top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability and rank of one token per row and of the row's likeliest tokens.

    A token's rank is 1 plus the number of tokens strictly likelier than it.

    Args:
        logits: Raw logits, float32 [R, V].
        token_ids: int64 [R].
        top: How many of the likeliest tokens each row lists.
    """
    norms = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    width = min(max(top, default=0), logits.shape[1])
    values, indices = largest(logits, width)
    rows = zip(
        token_ids.tolist(),
        (chosen - norms)[:, 0].tolist(),
        ranks,
        indices.tolist(),
        (values - norms).tolist(),
        top,
        strict=True,
    )
    return [_listing(token, logprob, rank, ids[:k], logprobs[:k]) for token, logprob, rank, ids, logprobs, k in rows]


def _listing(token: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    listing = {token: Logprob(logprob, rank)}
    position = 0
    for index, (other, value) in enumerate(zip(ids, logprobs, strict=True)):
        if value < logprobs[position]:
            position = index
        listing.setdefault(other, Logprob(value, position + 1))
    return listing

"""Log-probabilities of the model's own distribution, before any bias, penalty or temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedlc_engine.request import Logprob, TokenLogprobs
from pagedlc_engine.sampling.rows import largest, row_sums

__all__ = ["listings", "measure", "prompt_logprobs"]

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
        table = measure(logits[part], target_ids[part], k)
        result += listings(table, [k] * len(table))
    return result


def measure(logits: Tensor, token_ids: Tensor, width: int) -> Tensor:
    """Log-probability and rank of one token per row, and the row's likeliest tokens, without a look from the host.

    A token's rank is 1 plus the number of tokens strictly likelier than it.

    Args:
        logits: Raw logits, float32 [R, V].
        token_ids: int64 [R].
        width: How many of the likeliest tokens to list; fewer where there are not so many.

    Returns:
        float64 [R, 3 + 2 * width], which holds all of these numbers exactly: token, log-probability, rank, then the
        likeliest tokens' ids and log-probabilities.
    """
    peak = logits.amax(-1, keepdim=True)
    norms = (peak + row_sums((logits - peak).exp_()).log()).to(torch.float32)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(-1, keepdim=True) + 1
    values, indices = largest(logits, min(width, logits.shape[1]))
    columns = (token_ids[:, None], chosen - norms, ranks, indices, values - norms)
    return torch.cat([column.to(torch.float64) for column in columns], dim=1)


def listings(table: Tensor, top: Sequence[int]) -> list[TokenLogprobs]:
    """What :func:`measure` found, row by row.

    Args:
        table: float64 [R, 3 + 2 * width].
        top: How many of the likeliest tokens each row lists.
    """
    width = (table.shape[1] - 3) // 2
    found = []
    for (token, logprob, rank, *rest), k in zip(table.tolist(), top, strict=True):
        ids = [int(index) for index in rest[:width][:k]]
        found.append(_listing(int(token), logprob, int(rank), ids, rest[width:][:k]))
    return found


def _listing(token: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    listing = {token: Logprob(logprob, rank)}
    position = 0
    for index, (other, value) in enumerate(zip(ids, logprobs, strict=True)):
        if value < logprobs[position]:
            position = index
        listing.setdefault(other, Logprob(value, position + 1))
    return listing

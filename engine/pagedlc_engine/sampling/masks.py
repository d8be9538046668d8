"""Stages that forbid or favour single tokens. Each changes ``logits`` in place.

Entries are flat and parallel: entry ``i`` concerns token ``ids[i]`` of row ``rows[i]``. They are added to the
logits, so several entries may meet on one token, and a token once at -inf stays there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Allowed", "BadWords", "Bias", "MinTokens", "add_bias", "allow_only", "ban_bad_words", "ban_early_stop"]


@dataclass(frozen=True, slots=True)
class Bias:
    """``logit_bias``: int64 rows [E], int64 ids [E], float32 values [E]."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class MinTokens:
    """``min_tokens``: token ``ids[i]`` of row ``rows[i]`` is forbidden before ``minimum[i]`` tokens; int64 [E]."""

    rows: Tensor
    ids: Tensor
    minimum: Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """``bad_words``: each entry is one word.

    Args:
        rows: Row of the word's request in the batch, int64 [W].
        history_rows: Row of the word's request in the token history, int64 [W].
        prefixes: All tokens of the word but the last, right-aligned and filled with -1, int64 [W, H].
        ids: The last token of each word, int64 [W].
    """

    rows: Tensor
    history_rows: Tensor
    prefixes: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Allowed:
    """Rows that may only draw certain tokens.

    Args:
        rows: Rows in the batch, int64 [G].
        bits: One bit per token, lowest first, int32 [G, W] with W = V / 32, rounded up; 1 allows the token.
    """

    rows: Tensor
    bits: Tensor


def allow_only(logits: Tensor, allowed: Allowed) -> None:
    """Forbid all other tokens."""
    bits = (allowed.bits[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    # 1 - 1/bit is 0 or -inf; on a CPU this is many times faster than a boolean mask.
    penalties = bits.to(torch.float32).reciprocal_().neg_().add_(1.0).flatten(1)
    logits.index_add_(0, allowed.rows, penalties[:, : logits.shape[1]])


def add_bias(logits: Tensor, bias: Bias) -> None:
    """Add each bias to its logit."""
    logits.index_put_((bias.rows, bias.ids), bias.values, accumulate=True)


def ban_early_stop(logits: Tensor, entries: MinTokens, output_lengths: Tensor) -> None:
    """Forbid stop tokens in rows whose ``output_lengths`` (int64 [S]) are below their minimum."""
    _ban(logits, entries.rows, entries.ids, output_lengths[entries.rows] < entries.minimum)


def ban_bad_words(logits: Tensor, words: BadWords, tails: Tensor) -> None:
    """Forbid the last token of each word whose other tokens are the latest ones.

    Args:
        logits: float32 [S, V].
        words: The words.
        tails: Latest generated tokens of each word's request, right-aligned, int64 [W, H]; -2 where there is none.
    """
    matches = ((words.prefixes == tails) | (words.prefixes == -1)).all(-1)
    _ban(logits, words.rows, words.ids, matches)


def _ban(logits: Tensor, rows: Tensor, ids: Tensor, banned: Tensor) -> None:
    penalty = torch.zeros(banned.shape, device=logits.device).masked_fill_(banned, -torch.inf)
    logits.index_put_((rows, ids), penalty, accumulate=True)

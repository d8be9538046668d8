"""Repetition, presence and frequency penalties.

Only tokens that were seen can change, and those are few beside the vocabulary: their logits are gathered,
changed, and scattered back. A token listed twice is computed twice with the same result, so lists may repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Penalties", "apply_penalties"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalised rows of a batch.

    Args:
        rows: Rows in the batch, int64 [R].
        history_rows: Their rows in the token history, int64 [R].
        repetition: float32 [R, 1].
        frequency: float32 [R, 1].
        presence: float32 [R, 1].
    """

    rows: Tensor
    history_rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def apply_penalties(logits: Tensor, penalties: Penalties, seen: Tensor, counts: Tensor) -> None:
    """Penalise repeated tokens, in place: repetition first, then frequency and presence.

    Args:
        logits: float32 [S, V].
        penalties: Which rows, and how much.
        seen: Ids in prompt or output of each penalised row, possibly repeated, int64 [R, L].
        counts: Occurrences in the output, float32 [all history rows, V].
    """
    places, values = _gather(logits, penalties.rows, seen)
    _, times = _gather(counts, penalties.history_rows, seen)
    values = torch.where(values > 0, values / penalties.repetition, values * penalties.repetition)
    values -= penalties.frequency * times
    values -= penalties.presence * (times > 0)
    logits.view(-1).scatter_(0, places, values.flatten())


def _gather(table: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Places of ``ids`` (int64 [R, L]) in the flattened table (int64 [R * L]), and the values there ([R, L])."""
    places = (ids + rows[:, None] * table.shape[1]).flatten()
    return places, table.view(-1).index_select(0, places).view(ids.shape)

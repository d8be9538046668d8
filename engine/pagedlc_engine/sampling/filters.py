"""min_p, top_k and top_p as one cut per row: tokens with a weight below the cut are dropped.

Weights are ``exp((logit - greatest logit) / temperature)``: probabilities up to a factor, the greatest being 1.
A cut is a value, not a list of tokens, so tokens of exactly equal weight are kept or dropped together, and what a
row keeps cannot depend on how a sort orders ties or on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedlc_engine.sampling.rows import largest, select

__all__ = ["TopKTopP", "top_k_top_p_cut"]

# Candidates looked at in turn by rows whose top_p is not yet reached; the last resort is the whole row.
_FIRST_WIDTH = 128
_SECOND_WIDTH = 2048


@dataclass(frozen=True, slots=True)
class TopKTopP:
    """Rows with top_k or top_p.

    Args:
        rows: Rows among the sampled rows, int64 [R]; ``None`` means all.
        top_k: int64 [R, 1]; 0 keeps all.
        top_p: float64 [R, 1].
        any_top_p: Some ``top_p`` is below 1.
        width: Candidates to look at first.
    """

    rows: Tensor | None
    top_k: Tensor
    top_p: Tensor
    any_top_p: bool
    width: int

    @classmethod
    def create(
        cls, rows: Tensor | None, top_k: list[int], top_p: list[float], vocab_size: int, device: torch.device
    ) -> TopKTopP:
        """From one ``top_k`` (0 keeps all) and ``top_p`` per row."""
        widths = (k if 0 < k <= _SECOND_WIDTH else _FIRST_WIDTH for k in top_k)
        return cls(
            rows=rows,
            top_k=torch.tensor(top_k, device=device).clamp_(max=vocab_size)[:, None],
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device)[:, None],
            any_top_p=any(p < 1.0 for p in top_p),
            width=min(max(widths), vocab_size),
        )


def top_k_top_p_cut(weights: Tensor, floor: Tensor, spec: TopKTopP) -> Tensor:
    """The least weight kept by top_k and then top_p, never below ``floor``.

    The nucleus of top_p is the smallest set of likeliest tokens that holds at least ``top_p`` of the
    probability left by ``floor`` and top_k.

    Args:
        weights: float32 [R, V].
        floor: Least weight kept so far (min_p), float32 [R, 1].
        spec: The rows' parameters; its ``rows`` are already selected in ``weights`` and ``floor``.

    Returns:
        float32 [R, 1].
    """
    top_k, top_p, width = spec.top_k, spec.top_p, spec.width
    cut, settled = _cut_among(weights, floor, top_k, top_p, spec.any_top_p, width)
    while width < weights.shape[1] and not settled.all():
        width = _SECOND_WIDTH if width < _SECOND_WIDTH < weights.shape[1] else weights.shape[1]
        rows = (~settled).nonzero()[:, 0]
        cut[rows], settled[rows] = _cut_among(
            select(weights, rows), floor[rows], top_k[rows], top_p[rows], spec.any_top_p, width
        )
    return cut


def _cut_among(
    weights: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor, any_top_p: bool, width: int
) -> tuple[Tensor, Tensor]:
    """The cut as seen from each row's ``width`` largest weights, and whether more could not change it (bool [R])."""
    top = largest(weights, width)
    kth = top.gather(1, (top_k - 1).clamp(0, width - 1))
    cut = torch.maximum(floor, kth.masked_fill_(top_k == 0, 0.0))
    settled = top_k <= width
    if any_top_p:
        # Sums in float64 make the nucleus independent of the order and number of terms, short of exact ties.
        wanted = top_p * weights.masked_fill(weights < cut, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        kept = top.to(torch.float64).masked_fill_(top < cut, 0.0)
        mass = kept.cumsum(-1)
        nucleus_size = (mass - kept < wanted).sum(-1, keepdim=True)
        nucleus = top.gather(1, (nucleus_size - 1).clamp_(min=0))
        settled &= (top_p == 1.0) | ~(mass[:, -1:] < wanted)
        cut = torch.where(top_p < 1.0, torch.maximum(cut, nucleus), cut)
    return cut, settled[:, 0]

"""min_p, top_k and top_p as one cut per row: tokens with a weight below the cut are dropped.

Weights are ``exp((logit - greatest logit) / temperature)``: probabilities up to a factor, the greatest being 1.
A cut is a value, not a list of tokens, so tokens of exactly equal weight are kept or dropped together, and what a
row keeps cannot depend on how a sort orders ties or on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedlc_engine.sampling.radix import cut_reaching
from pagedlc_engine.sampling.rows import largest, row_sums, select

__all__ = ["MOST_CANDIDATES", "TopK", "TopP", "drop_below", "top_k_cut", "top_p_cut"]

#: A top_k up to this is found by a partial sort; a larger one is found like a top_p.
MOST_CANDIDATES = 1024

# Most nuclei are smaller than this; a partial sort of so few is quicker than a search of the whole row.
_USUAL_NUCLEUS = 128


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows with a top_k, and maybe a top_p within it.

    Args:
        rows: Rows among the drawn rows, int64 [R]; ``None`` means all.
        top_k: int64 [R, 1], at most V.
        width: The greatest of them.
        top_p: float64 [R, 1], or ``None`` when no row has one.
    """

    rows: Tensor | None
    top_k: Tensor
    width: int
    top_p: Tensor | None


@dataclass(frozen=True, slots=True)
class TopP:
    """Rows with a top_p and no top_k: rows as above, top_p float64 [R, 1]."""

    rows: Tensor | None
    top_p: Tensor


def top_k_cut(weights: Tensor, spec: TopK) -> Tensor:
    """The least weight kept by top_k, and by top_p of what top_k leaves.

    Args:
        weights: float32 [R, V].
        spec: The rows' parameters.

    Returns:
        float32 [R, 1].
    """
    kth, nucleus = (_by_partial_sort if spec.width <= MOST_CANDIDATES else _by_search)(weights, spec)
    # A top_p of 1 must not lose the last token to rounding.
    return kth if spec.top_p is None else torch.where(spec.top_p < 1.0, torch.maximum(kth, nucleus), kth)


def _by_partial_sort(weights: Tensor, spec: TopK) -> tuple[Tensor, Tensor]:
    """Cuts of top_k, and of top_p among the k largest; float32 [R, 1] each."""
    width = min(spec.width + 1, weights.shape[1])
    top, _ = largest(weights, width)
    kth = top.gather(1, spec.top_k - 1)
    if spec.top_p is None:
        return kth, kth
    following = top.gather(1, spec.top_k.clamp(max=width - 1))
    top = top.masked_fill_(torch.arange(width, device=top.device) >= spec.top_k, 0.0)
    mass = row_sums(top)
    # Ties of the last token count, too; a nucleus that needs them ends at their value.
    tied = (following == kth) & (spec.top_k < width)
    if weights.is_cuda:  # all rows, so that the host need not look
        mass = torch.where(tied, _kept_mass(weights.clone(), kth), mass)
    else:
        rows = tied.nonzero()[:, 0]
        if len(rows):
            mass = mass.index_copy(0, rows, _kept_mass(select(weights, rows), kth[rows]))
    return kth, _nucleus(top, spec.top_p * mass)[0]


def _kept_mass(weights: Tensor, cut: Tensor) -> Tensor:
    """Mass of the weights (float32 [R, V]; changed) from ``cut`` on, float64 [R, 1]."""
    return row_sums(drop_below(weights, cut))


def _by_search(weights: Tensor, spec: TopK) -> tuple[Tensor, Tensor]:
    """The same, without a sort."""
    kth = cut_reaching(weights, torch.ones_like(weights), spec.top_k)
    if spec.top_p is None:
        return kth, kth
    return kth, top_p_cut(drop_below(weights.clone(), kth), spec.top_p)


def top_p_cut(weights: Tensor, top_p: Tensor) -> Tensor:
    """The least weight in the smallest set of likeliest tokens that holds ``top_p`` of the mass.

    Args:
        weights: float32 [R, V].
        top_p: float64 [R, 1].

    Returns:
        float32 [R, 1].
    """
    wanted = top_p * row_sums(weights)
    if weights.is_cuda:
        return nucleus_by_sort(weights, wanted)
    cut, reached = _nucleus(largest(weights, min(_USUAL_NUCLEUS, weights.shape[1]))[0], wanted)
    wider = (~reached).nonzero()[:, 0]
    if len(wider):
        part = select(weights, wider)
        cut = cut.index_copy(0, wider, cut_reaching(part, part, wanted[wider]))
    return cut


def nucleus_by_sort(weights: Tensor, wanted: Tensor) -> Tensor:
    """The cut of :func:`top_p_cut` by a full sort: on a GPU quick, and the host need not look at intermediate results.

    Args:
        weights: float32 [R, V].
        wanted: The mass to hold, float64 [R, 1].

    Returns:
        float32 [R, 1].
    """
    return _nucleus(weights.sort(-1, descending=True).values, wanted)[0]


def _nucleus(top: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where the sum of ``top`` (float32 [R, K], descending) reaches ``wanted`` (float64 [R, 1]).

    Returns:
        The value there, or the last one, float32 [R, 1]; whether it was reached, bool [R]. Rows of NaN count as
        reached: they fail anyway.
    """
    mass = top.to(torch.float64).cumsum(-1)
    size = (mass < wanted).sum(-1, keepdim=True)
    return top.gather(1, size.clamp(max=top.shape[1] - 1)), size[:, 0] < top.shape[1]


def drop_below(weights: Tensor, cut: Tensor) -> Tensor:
    """Set weights (float32 [R, V]) below ``cut`` (float32 [R, 1]) to 0, in place, and return them."""
    # A comparison written as 0.0 and 1.0 multiplies several times faster than a boolean mask fills on a CPU.
    return weights.mul_(torch.ge(weights, cut, out=torch.empty_like(weights)))

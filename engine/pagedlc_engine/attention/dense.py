"""Dense attention that also gives the log-sum-exp, and how two results are merged."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["attend", "mask_value", "merge_"]

# The public function keeps the log-sum-exp to itself. The overload is looked up once: that costs microseconds.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def mask_value(dtype: torch.dtype) -> float:
    """What is added to a forbidden score.

    Finite, so that a tile of keys that is forbidden as a whole gives weights that a later tile scales to
    zero, where minus infinity would give NaN.
    """
    return torch.finfo(dtype).min / 2


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention.

    Args:
        query: ``[N, H, Q, D]``, any strides.
        key: ``[N, K, L, D]`` where ``K`` divides ``H``; each key head serves ``H / K`` query heads.
        value: ``[N, K, L, D]``.
        mask: Added to the scores; broadcasts to ``[N, 1, Q, L]``, dtype of ``query``.
        causal: Query ``i`` sees keys ``0 .. i``; needs ``Q == L``.

    Returns:
        Output ``[N, H, Q, D]`` and log-sum-exp of the scores ``[N, H, Q]`` in float32.
    """
    if query.device.type == "cpu":
        out, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask)
        return out, lse
    return _attend_by_products(query, key, value, mask, causal)


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1).float()
    value = value.repeat_interleave(groups, dim=1).float()
    scores = (query.float() / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, mask_value(scores.dtype))
    lse = scores.logsumexp(dim=-1)
    return ((scores - lse[..., None]).exp() @ value).to(query.dtype), lse


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Fold the result over further keys into ``out`` and ``lse``, in place.

    Args:
        out: ``[R, H, D]``.
        lse: ``[R, H]``.
        more_out: ``[R, H, D]``, over keys that ``out`` has not seen.
        more_lse: ``[R, H]``.
    """
    weight = torch.sigmoid(more_lse - lse)
    out.lerp_(more_out, weight.to(out.dtype)[..., None])
    torch.logaddexp(lse, more_lse, out=lse)

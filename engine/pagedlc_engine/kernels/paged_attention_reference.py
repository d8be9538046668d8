"""Plain-torch reference of :func:`pagedlc_engine.kernels.paged_attention.paged_attention`."""

from __future__ import annotations

import torch

from pagedlc_engine.kernels.attention_plan import AttentionPlan

__all__ = ["paged_attention_reference"]


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention request by request in float64, from the plan's lengths and block tables alone (its tiles are unused).

    Args:
        query: [T, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim].
        value_cache: Like ``key_cache``.
        plan: The step.
        scale: Factor on the scores.
        window: Keys a query sees, its own included; ``None`` for all.
        soft_cap: Bound on scores.

    Returns:
        float64 [T, heads, head_dim].
    """
    block_size = key_cache.shape[1]
    group = query.shape[1] // key_cache.shape[2]
    outputs = []
    first = 0
    for row, (length, context) in enumerate(zip(plan.query_lens.tolist(), plan.context_lens.tolist(), strict=True)):
        blocks = plan.block_tables[row, : -(-context // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:context].double().repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query[first : first + length].double(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(context - length, context, device=query.device)[:, None]
        key = torch.arange(context, device=query.device)[None, :]
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        first += length
    return torch.cat(outputs)

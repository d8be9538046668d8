"""From the projection to the cache: query/key norm, rotary embedding and the cache write in one pass."""

# Upper-case arguments of kernels are compile-time constants.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedlc_engine.kernels.launch import can_overlap, launch_options

__all__ = ["norm_rope_cache", "norm_rope_cache_reference", "write_cache", "write_cache_reference"]


@triton.jit
def _norm_rope_cache_kernel(
    projected,
    query_gain,
    key_gain,
    rotation,
    positions,
    slots,
    query,
    key_cache,
    value_cache,
    row_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tokens, ceil(all heads / HEADS)). Both halves of a head are read once, as two tiles."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF_PAD)
    in_half = (dim < HALF)[None, :]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    cos = tl.load(rotation + position * 2 * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(rotation + position * 2 * HALF + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    if OVERLAP:
        gdc_wait()
    source = projected + token * row_stride + head[:, None] * (2 * HALF) + dim[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        gain_low = tl.where(
            is_query,
            tl.load(query_gain + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :],
            tl.load(key_gain + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :],
        )
        gain_high = tl.where(
            is_query,
            tl.load(query_gain + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :],
            tl.load(key_gain + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :],
        )
        a = a * scale * gain_low
        b = b * scale * gain_high
    turned_low = (a * cos - b * sin).to(low.dtype)
    turned_high = (b * cos + a * sin).to(low.dtype)
    target = query + (token * NUM_HEADS + head[:, None]) * (2 * HALF) + dim[None, :]
    tl.store(target, turned_low, mask=is_query & in_half)
    tl.store(target + HALF, turned_high, mask=is_query & in_half)
    if slot >= 0:
        cached = slot * (NUM_KV_HEADS * 2 * HALF)
        key_head = (head - NUM_HEADS)[:, None]
        is_key = (key_head >= 0) & (key_head < NUM_KV_HEADS) & in_half
        target = key_cache + cached + key_head * (2 * HALF) + dim[None, :]
        tl.store(target, turned_low, mask=is_key)
        tl.store(target + HALF, turned_high, mask=is_key)
        target = value_cache + cached + (key_head - NUM_KV_HEADS) * (2 * HALF) + dim[None, :]
        tl.store(target, low, mask=is_value & inside)
        tl.store(target + HALF, high, mask=is_value & inside)


def norm_rope_cache(
    projected: torch.Tensor,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    eps: float = 1e-6,
    *,
    query: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Normalise (if there are gains) and rotate queries and keys, and store keys and values in the cache.

    Args:
        projected: [T, (heads + 2 * kv_heads) * head_dim]: queries, keys, values.
        query_gain: [head_dim] RMS norm weight of queries, or ``None``.
        key_gain: [head_dim] RMS norm weight of keys; ``None`` with ``query_gain``.
        rotation: float32 [positions, head_dim]: cosines of a position, then its sines; halves of a head are the
            two parts of a rotated pair.
        positions: Integer [T].
        slots: Integer [T], ``block * block_size + offset``; negative stores nothing.
        key_cache: [blocks, block_size, kv_heads, head_dim], contiguous.
        value_cache: Like ``key_cache``.
        num_heads: Query heads.
        eps: Added to the mean square.
        query: [T, heads, head_dim], contiguous, for the result; allocated when ``None``.
        overlap: Programmatic dependent launch.

    Returns:
        ``query``.
    """
    tokens = projected.shape[0]
    num_kv_heads, head_dim = key_cache.shape[2:]
    if query is None:
        query = torch.empty((tokens, num_heads, head_dim), dtype=projected.dtype, device=projected.device)
    overlap = overlap and can_overlap()
    heads = 4 if tokens < 1024 else 16
    _norm_rope_cache_kernel[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        projected,
        query_gain if query_gain is not None else rotation,
        key_gain if key_gain is not None else rotation,
        rotation,
        positions,
        slots,
        query,
        key_cache,
        value_cache,
        projected.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        HEADS=heads,
        NORM=query_gain is not None,
        OVERLAP=overlap,
        **launch_options(1 if heads == 4 else 4, 1, overlap=overlap),
    )
    return query


def norm_rope_cache_reference(
    projected: torch.Tensor,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Plain-torch :func:`norm_rope_cache`."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = projected.unflatten(1, (-1, head_dim))
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = rotation[positions.long()][:, None].float().chunk(2, dim=-1)

    def rotate(part: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        part = part.float()
        if gain is not None:
            part = part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + eps) * gain.float()
        low, high = part.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(projected.dtype)

    write_cache_reference(rotate(key, key_gain), value, slots, key_cache, value_cache)
    return rotate(query, query_gain)


@triton.jit
def _write_cache_kernel(
    key,
    value,
    slots,
    key_cache,
    value_cache,
    key_stride,
    value_stride,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
):
    """Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, PAD)
        inside = column < SIZE
        k = tl.load(key + token * key_stride + column, mask=inside)
        v = tl.load(value + token * value_stride + column, mask=inside)
        tl.store(key_cache + slot * SIZE + column, k, mask=inside)
        tl.store(value_cache + slot * SIZE + column, v, mask=inside)


def write_cache(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    """Store keys and values that are already rotated.

    Args:
        key: [T, kv_heads, head_dim], heads contiguous within a token.
        value: Like ``key``.
        slots: Integer [T], ``block * block_size + offset``; negative stores nothing.
        key_cache: [blocks, block_size, kv_heads, head_dim], contiguous.
        value_cache: Like ``key_cache``.
    """
    size = key_cache.shape[2] * key_cache.shape[3]
    _write_cache_kernel[(key.shape[0],)](
        key,
        value,
        slots,
        key_cache,
        value_cache,
        key.stride(0),
        value.stride(0),
        SIZE=size,
        PAD=triton.next_power_of_2(size),
        **launch_options(4 if size > 256 else 1, 1),
    )


def write_cache_reference(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    """Plain-torch :func:`write_cache`."""
    kept = slots >= 0
    key_cache.flatten(0, 1)[slots[kept].long()] = key[kept]
    value_cache.flatten(0, 1)[slots[kept].long()] = value[kept]

"""Paged attention, launched: from a plan to the kernels of :mod:`attention_kernels`.

The plain-torch reference is :mod:`paged_attention_reference`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from pagedlc_engine.kernels.attention_kernels import attention_kernel, merge_kernel
from pagedlc_engine.kernels.attention_plan import AttentionPlan, TileTable
from pagedlc_engine.kernels.launch import (
    LOG2_E,
    can_copy_in_bulk,
    can_overlap,
    can_specialize_warps,
    card_of,
    dot_precision,
    launch_options,
)

__all__ = [
    "AttentionConfig",
    "SpecializedConfig",
    "choose_config",
    "choose_specialized_config",
    "paged_attention",
]


# With fewer programs than this, each must keep more loads in flight; with more, programs hide each other's waits.
# Tiles of many rows do so from one program a multiprocessor on.
FEW_PROGRAMS = 264
FEW_WIDE_PROGRAMS = 132
# Intermediate results that one program merges at once, parts times heads, and most heads of them.
MERGED_AT_ONCE = 64
MERGED_HEADS = 8


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Compile-time choices of one launch.

    Args:
        keys: Keys a step of the inner loop; a power of two.
        num_warps: Warps a program.
        num_stages: Depth of the load pipeline.
        bulk_copy: Fetch keys and values by tensor descriptor; ``keys`` must divide the cache block.
        max_registers: Registers a thread, where fewer than the compiler would take let two programs share a
            multiprocessor, one multiplying while the other computes its softmax.
    """

    keys: int
    num_warps: int
    num_stages: int
    bulk_copy: bool = False
    max_registers: int | None = None


def choose_config(rows: int, head_dim: int, block_size: int, dtype: torch.dtype, programs: int) -> AttentionConfig:
    """The decision rule in place of a run-time tuner; the figures behind it are in benchmarks/NOTES.md.

    Args:
        rows: Rows of the query tile.
        head_dim: Elements a head.
        block_size: Tokens a cache block.
        dtype: Type of queries, keys and values.
        programs: Programs of the launch.
    """
    if dtype == torch.float32:
        return AttentionConfig(keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
    if rows <= 32:
        if head_dim > 128:
            return AttentionConfig(keys=32, num_warps=4, num_stages=3)
        return AttentionConfig(keys=64, num_warps=4, num_stages=5 if programs <= FEW_PROGRAMS else 3)
    warps = 8 if rows > 64 else 4
    if head_dim <= 128 and programs <= (FEW_WIDE_PROGRAMS if rows > 64 else FEW_PROGRAMS):
        return AttentionConfig(keys=64, num_warps=warps, num_stages=5)
    registers = 128 if head_dim <= 128 else None
    if can_copy_in_bulk() and block_size % 64 == 0 and head_dim in (64, 128, 256):
        return AttentionConfig(keys=64, num_warps=warps, num_stages=2, bulk_copy=True, max_registers=registers)
    return AttentionConfig(keys=64, num_warps=warps, num_stages=3 if head_dim <= 128 else 2, max_registers=registers)


@dataclass(frozen=True, slots=True)
class SpecializedConfig:
    """Compile-time choices of a launch of :mod:`specialized_attention`.

    Args:
        keys: Keys a turn; 64 or 128.
        num_stages: Turns whose keys and values are in shared memory at once.
        max_registers: Registers a thread at the start; the warps that multiply take over those of the others.
    """

    keys: int
    num_stages: int
    max_registers: int


def choose_specialized_config(rows: int, shared: bool) -> SpecializedConfig:
    """The decision rule; the figures behind it are in benchmarks/NOTES.md.

    Args:
        rows: Rows of the query tile, 64 or 128.
        shared: Whether it is a prefix pass.
    """
    registers = 128 if rows == 64 else 168
    if shared:
        return SpecializedConfig(keys=64, num_stages=4, max_registers=registers)
    return SpecializedConfig(keys=128, num_stages=2, max_registers=registers)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    overlap: bool = False,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Attention of every query token over its request's cached keys up to its own position.

    Args:
        query: [T, heads, head_dim], heads contiguous within a token.
        key_cache: [blocks, block_size, kv_heads, head_dim], contiguous.
        value_cache: Like ``key_cache``.
        plan: The step, cut into tiles.
        scale: Factor on the scores, usually ``head_dim ** -0.5``.
        window: Keys a query sees, its own included; ``None`` for all.
        soft_cap: Bound on scores by ``soft_cap * tanh(score / soft_cap)``.
        out: [T, heads, head_dim], contiguous; allocated when ``None``.
        overlap: Programmatic dependent launch: the first kernel may start while its predecessor, a kernel of this
            package, still runs; queries and cache may be that one's results.
        config: Compile-time choices for every launch instead of :func:`choose_config`'s.

    Returns:
        ``out``.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_heads, head_dim = query.shape[1], query.shape[2]
    partial_out = torch.empty((plan.partial_rows, num_heads, head_dim), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((plan.partial_rows, num_heads), dtype=torch.float32, device=query.device)
    launch = _Launch(
        query, key_cache, value_cache, out, plan, partial_out, partial_lse, scale, window or 0, soft_cap, config
    )
    shared = plan.shared if window is None else None
    early = overlap and can_overlap()
    for table in plan.tables if window is None else plan.unshared:
        if table.merges_prefix and shared is not None:
            launch.attend(shared, is_shared=True, early=early)
            early = False
        launch.attend(table, early=early)
        early = False
        if table.splits > 1 or table.merges_prefix:
            launch.merge(table, shared.splits if table.merges_prefix and shared is not None else 0)
    return out


@dataclass(frozen=True, slots=True)
class _Launch:
    """The arguments that all launches of one call have in common."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    out: torch.Tensor
    plan: AttentionPlan
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    scale: float
    window: int
    soft_cap: float | None
    config: AttentionConfig | None

    def _config(self, table: TileTable) -> AttentionConfig:
        if self.config is not None:
            return self.config
        _, block_size, num_kv_heads, head_dim = self.key_cache.shape
        programs = (len(table.records) - table.spare) * table.splits * num_kv_heads
        return choose_config(table.rows, head_dim, block_size, self.query.dtype, programs)

    def _specializes(self, table: TileTable, is_shared: bool) -> bool:
        """Whether :mod:`specialized_attention` is for these tiles: those of prompts and of prefix passes."""
        _, block_size, _, head_dim = self.key_cache.shape
        meant = table.rows in (64, 128) and (is_shared or table.tokens > 1)
        known = head_dim in (64, 128) and block_size % 64 == 0 and self.query.element_size() == 2
        plain = not table.merges_prefix and not self.window and self.soft_cap is None
        return meant and known and plain and self.config is None and can_specialize_warps()

    def _attend_specialized(self, table: TileTable, is_shared: bool, early: bool) -> None:
        # Not before it is needed: other versions of Triton may not know what it imports.
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as BoxDescriptor

        from pagedlc_engine.kernels.specialized_attention import BOXES, specialized_attention_kernel

        num_blocks, block_size, num_kv_heads, head_dim = self.key_cache.shape
        num_heads = self.query.shape[1]
        group = num_heads // num_kv_heads
        shape = (num_blocks, block_size, num_kv_heads * head_dim)
        keys, values = (
            BoxDescriptor.from_tensor(cache.view(shape), [1, 64, 64], BOXES)
            for cache in (self.key_cache, self.value_cache)
        )
        tiles = len(table.records)
        programs = min(card_of(self.query.device).num_processors, tiles * num_kv_heads * table.splits)
        boxed = not is_shared and group & (group - 1) == 0
        query = self.query
        if boxed:
            query = BoxDescriptor.from_tensor(query, [table.rows // group, group, 64], BOXES)
        config = choose_specialized_config(table.rows, is_shared)
        specialized_attention_kernel[(programs,)](
            query,
            keys,
            values,
            self.out,
            self.plan.block_tables,
            table.records,
            self.plan.members,
            self.partial_out,
            self.partial_lse,
            tiles,
            table.splits,
            self.scale * LOG2_E,
            self.plan.block_tables.stride(0),
            self.query.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            KEYS=config.keys,
            STAGES=config.num_stages,
            SPLIT=table.splits > 1,
            SHARED=is_shared,
            BOXED=boxed,
            TEAMS=table.rows // 64,
            EARLY=early,
            **launch_options(4, overlap=early, max_registers=config.max_registers),
        )

    def attend(self, table: TileTable, *, is_shared: bool = False, early: bool = False) -> None:
        if self._specializes(table, is_shared):
            self._attend_specialized(table, is_shared, early)
            return
        num_blocks, block_size, num_kv_heads, head_dim = self.key_cache.shape
        num_heads = self.query.shape[1]
        config = self._config(table)
        keys, values = self.key_cache, self.value_cache
        if config.bulk_copy:
            keys, values = (
                TensorDescriptor.from_tensor(
                    cache.view(num_blocks * block_size, num_kv_heads * head_dim), [config.keys, head_dim]
                )
                for cache in (keys, values)
            )
        capped = self.soft_cap is not None
        overlap = can_overlap()
        attention_kernel[(num_kv_heads, len(table.records), table.splits)](
            self.query,
            keys,
            values,
            self.out,
            self.plan.block_tables,
            table.records,
            self.plan.members,
            self.partial_out,
            self.partial_lse,
            self.scale / self.soft_cap if self.soft_cap else self.scale * LOG2_E,
            self.soft_cap * LOG2_E if self.soft_cap else 0.0,
            self.plan.block_tables.stride(0),
            self.query.stride(0),
            self.window,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=block_size,
            ROWS=table.rows,
            KEYS=config.keys,
            SPLIT=table.splits > 1,
            SHARED=is_shared,
            AFTER_PREFIX=table.merges_prefix,
            WINDOWED=self.window > 0,
            CAPPED=capped,
            BULK=config.bulk_copy,
            TWO_PHASES=table.rows > 32 and self.window == 0,
            PRECISION=dot_precision(self.query.dtype),
            OVERLAP=overlap,
            EARLY=early,
            **launch_options(
                config.num_warps,
                config.num_stages,
                overlap=early or (overlap and table.merges_prefix),
                max_registers=config.max_registers,
            ),
        )

    def merge(self, table: TileTable, prefix_splits: int) -> None:
        num_heads, head_dim = self.query.shape[1:]
        overlap = can_overlap()
        parts = triton.next_power_of_2(table.splits + prefix_splits)
        heads = min(MERGED_HEADS, max(1, MERGED_AT_ONCE // parts), triton.next_power_of_2(num_heads))
        merge_kernel[(triton.cdiv(num_heads, heads), len(table.records), table.tokens)](
            self.out,
            table.records,
            self.partial_out,
            self.partial_lse,
            self.window,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(head_dim),
            HEADS=heads,
            KEYS=self._config(table).keys,
            PARTS=parts,
            WINDOWED=self.window > 0,
            OVERLAP=overlap,
            **launch_options(4, 1, overlap=overlap),
        )

"""Sizes: what a captured step may hold, and where things lie in a packet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pagedlc_engine.kernels.attention_plan import RECORD

__all__ = ["SPARE_SHARED_TILES", "PacketLayout", "StepShape"]

#: Tiles of the prefix pass beyond full ones: for that many further groups.
SPARE_SHARED_TILES = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """Launch sizes of one step. A step that holds less is padded.

    Args:
        tokens: Rows of the layers' products.
        samples: Rows of logits.
        narrow: Attention tiles of requests with one token.
        narrow_splits: Programs along a tile's keys.
        wide: Attention tiles of prompt chunks.
        wide_rows: Rows (tokens × heads of a KV head) of such a tile.
        wide_splits: Programs along its keys.
        shared: Tiles of the pass over prefixes that several requests share.
        shared_rows: Rows of such a tile.
        shared_splits: Programs along a prefix.
        decodes: One token and one sample per request, so sample rows are token rows, and no request reads a block
            that another one writes in the step.
        every_row: Finish every token's row, not only those that are sampled from.
    """

    tokens: int
    samples: int
    narrow: int = 0
    narrow_splits: int = 1
    wide: int = 0
    wide_rows: int = 128
    wide_splits: int = 1
    shared: int = 0
    shared_rows: int = 64
    shared_splits: int = 0
    decodes: bool = False
    every_row: bool = False

    @property
    def samples_alone(self) -> bool:
        """Whether the last layer goes on with the sampled rows alone, once its keys and values are stored."""
        return self.samples < self.tokens and not self.every_row

    @property
    def partial_rows(self) -> int:
        """Rows of intermediate attention results."""
        narrow = self.narrow * (self.narrow_splits + self.shared_splits)
        wide = self.tokens * self.wide_splits if self.wide and self.wide_splits > 1 else 0
        return max(narrow if self.narrow_splits + self.shared_splits > 1 else 0, wide)


def _aligned(length: int) -> int:
    return -(-length // 16) * 16


@dataclass(frozen=True)
class PacketLayout:
    """Where the regions of a packet begin, in int32; each begins at a multiple of 64 bytes.

    A packet is: header (tokens, samples, number of the packet), sample rows, sample slots, narrow records, shared
    records, members, wide records; then four planes over tokens: code (a token id, or -1 - slot for the newest
    token of a slot), position, cache slot, slot of the block table.

    Args:
        tokens: Most tokens of a step.
        samples: Most samples of a step.
        wide: Most wide tiles.
    """

    tokens: int
    samples: int
    wide: int

    @cached_property
    def sample_rows(self) -> int:
        """Start of the rows of the hidden vectors to sample from."""
        return 16

    @cached_property
    def sample_slots(self) -> int:
        """Start of the slots that samples belong to."""
        return self.sample_rows + _aligned(self.samples)

    @cached_property
    def narrow(self) -> int:
        """Start of the narrow tiles' records, at most one per sample or token."""
        return self.sample_slots + _aligned(self.samples)

    @cached_property
    def shared(self) -> int:
        """Start of the shared tiles' records."""
        return self.narrow + _aligned(self.samples * RECORD)

    @cached_property
    def members(self) -> int:
        """Start of the shared tiles' members, three numbers each."""
        return self.shared + _aligned(self.samples * RECORD)

    @cached_property
    def wide_records(self) -> int:
        """Start of the wide tiles' records."""
        return self.members + _aligned(self.samples * 3)

    @cached_property
    def codes(self) -> int:
        """Start of the four token planes, which is the end of what stays on the device as it came."""
        return self.wide_records + _aligned(self.wide * RECORD)

    @cached_property
    def size(self) -> int:
        """Length of a packet."""
        return self.codes + 4 * _aligned(self.tokens)

    @cached_property
    def plane(self) -> int:
        """Length of a token plane."""
        return _aligned(self.tokens)

"""Physical KV blocks: reference counts, a free list in LRU order, and the map from content to block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["NULL_BLOCK", "BlockPool"]

#: Never handed out: padding in block tables points here, and padded rows of a batch write here.
NULL_BLOCK = 0


class BlockPool:
    """Hands out block numbers ``1 … num_blocks - 1`` and remembers what full blocks contain.

    A block is *in use* (reference count above zero) or *free*. A free block may still be *cached*: it keeps
    its contents until it is taken for something else, least recently freed first. All operations are O(1)
    per block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks, not {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        """Blocks that can hold tokens at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`allocate` could hand out now, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose contents can be found by key, in use or free."""
        return len(self._block_of)

    def ref_count(self, block: int) -> int:
        """How many block tables hold ``block``."""
        return self._ref_counts[block]

    def is_free(self, block: int) -> bool:
        """Whether ``block`` is on the free list (cached or not)."""
        return block in self._free

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are on the free list."""
        return sum(map(self._free.__contains__, blocks))

    def lookup_chain(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks with these contents, up to the first that is not there."""
        blocks = []
        look_up = self._block_of.get
        for key in keys:
            block = look_up(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks with reference count 1, forgetting what they held.

        Raises:
            ValueError: Fewer are free; look at :attr:`num_free` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; a cached free block comes back into use."""
        counts, free = self._ref_counts, self._free
        for block in blocks:
            if counts[block] == 0:
                del free[block]
            counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, in order of how soon it may be evicted.

        Blocks without cached contents are reused before any cached one.
        """
        counts, free, key_of = self._ref_counts, self._free, self._key_of
        for block in blocks:
            count = counts[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is free already")
            counts[block] = count
            if count == 0:
                free[block] = None
                if key_of[block] is None:
                    free.move_to_end(block, last=False)

    def register(self, block: int, key: bytes) -> None:
        """Remember that ``block`` holds the contents named ``key``; the first block of a key stays its block."""
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the cached contents of these blocks; whoever holds them keeps them."""
        for block in blocks:
            self._forget(block)

    def forget_all(self) -> None:
        """Drop every cached content; blocks in use stay in use."""
        for block in self._block_of.values():
            self._key_of[block] = None
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

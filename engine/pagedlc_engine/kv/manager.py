"""Block tables: which physical blocks hold a sequence's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagedlc_engine.kv.block_pool import BlockPool

__all__ = ["BlockTable", "KVCacheManager"]

#: Block numbers in order of position, as C ints so that a row can be copied into a tensor at once.
BlockTable = array


class KVCacheManager:
    """Gives sequences blocks as they grow, shares cached prefixes, copies on write.

    Args:
        pool: The physical blocks.
        block_size: Tokens per block.
        enable_prefix_caching: Whether full blocks are registered and looked up by content.
    """

    def __init__(self, pool: BlockPool, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        #: Tables opened so far: while it stays, each sequence's table is the one it was.
        self.num_opened = 0
        self._tables: dict[int, array[int]] = {}

    def table(self, key: int) -> array[int]:
        """The block table of sequence ``key``."""
        return self._tables[key]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, keys: Sequence[bytes], max_tokens: int) -> list[int]:
        """The longest run of cached blocks for a chain of keys, covering at most ``max_tokens`` tokens."""
        return self.pool.lookup_chain(keys[: max_tokens // self.block_size]) if self.enable_prefix_caching else []

    def open(self, key: int, prefix: Sequence[int], num_tokens: int, reserve: int = 0) -> bool:
        """Start a table: share ``prefix`` blocks and add new ones up to ``num_tokens`` tokens.

        Args:
            key: The sequence.
            prefix: Cached blocks of its first tokens (from :meth:`match_prefix`).
            num_tokens: Tokens the table must cover.
            reserve: Blocks that must stay free besides.

        Returns:
            False, with nothing changed, when there are too few free blocks.
        """
        new = self.blocks_for(num_tokens) - len(prefix)
        if new + self.pool.count_free(prefix) + reserve > self.pool.num_free:
            return False
        self.num_opened += 1
        self.pool.share(prefix)
        self._tables[key] = array("i", prefix)
        self._tables[key].extend(self.pool.allocate(new))
        return True

    def grow(self, key: int, first_new: int, num_tokens: int) -> list[tuple[int, int]] | None:
        """Make positions ``first_new … num_tokens - 1`` of a sequence writable.

        Returns:
            The (source, destination) block copies to make before writing, usually none; or ``None``, with
            nothing changed, when there are too few free blocks.
        """
        table = self._tables[key]
        new = max(0, self.blocks_for(num_tokens) - len(table))
        at = first_new // self.block_size
        shared = at < len(table) and self.pool.ref_count(table[at]) > 1
        if new + shared > self.pool.num_free:
            return None
        copies = []
        if shared:
            (copy,) = self.pool.allocate(1)
            copies.append((table[at], copy))
            self.pool.release([table[at]])
            table[at] = copy
        if new:
            table.extend(self.pool.allocate(new))
        return copies

    def fork(self, parent: int, child: int) -> None:
        """Let ``child`` hold the same blocks as ``parent``; whoever writes a shared block copies it first."""
        table = self._tables[parent]
        self.pool.share(table)
        self._tables[child] = array("i", table)

    def register(self, key: int, index: int, block_key: bytes) -> None:
        """Make the ``index``-th block of a sequence findable by its content."""
        if self.enable_prefix_caching:
            self.pool.register(self._tables[key][index], block_key)

    def close(self, key: int) -> None:
        """Give a sequence's blocks back; the end of a prefix is evicted before its beginning."""
        self.pool.release(reversed(self._tables.pop(key)))

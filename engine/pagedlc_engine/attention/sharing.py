"""Finding the blocks that several requests of a step have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagedlc_engine.attention.base import IntArray

__all__ = ["SharedRun", "find_shared_runs"]


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Columns ``begin .. end`` of the block tables are the same in all of ``rows``."""

    rows: list[int]
    begin: int
    end: int


def find_shared_runs(tables: IntArray, usable: IntArray, minimum: int) -> Iterator[SharedRun]:
    """Walk the prefix tree of the block tables and yield the runs worth reading once.

    A run is worth it when ``(rows - 1) * blocks`` reaches ``minimum``. Runs nest: rows that part ways after
    one run may share further ones in smaller groups. A row's runs follow each other without a gap from
    column 0 on.

    Args:
        tables: ``[B, max_blocks]`` physical blocks.
        usable: ``[B]``, leading blocks of each row that may be shared.
        minimum: Block reads to save, at least 1.
    """
    pending = [(list(range(len(tables))), 0, 0)]
    while pending:
        rows, begin, column = pending.pop()
        for members in _by_block(tables, usable, rows, column):
            end = column + _common_blocks(tables, usable, members, column)
            start = begin
            if (len(members) - 1) * (end - begin) >= minimum:
                yield SharedRun(members, begin, end)
                start = end
            pending.append((members, start, end))


def _by_block(tables: IntArray, usable: IntArray, rows: list[int], column: int) -> list[list[int]]:
    """Groups of at least two rows with the same block in ``column``."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        if column < usable[row]:
            groups.setdefault(int(tables[row, column]), []).append(row)
    return [members for members in groups.values() if len(members) > 1]


def _common_blocks(tables: IntArray, usable: IntArray, rows: list[int], column: int) -> int:
    block = tables[rows, column : int(usable[rows].min())]
    differing = np.flatnonzero((block != block[0]).any(axis=0))
    return int(differing[0]) if len(differing) else block.shape[1]

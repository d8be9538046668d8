"""Tokens seen so far, kept only for requests that need them (penalties, bad words)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["TokenHistory"]


class TokenHistory:
    """Prompt and output tokens, and counts of output tokens, one row per tracked request.

    Rows are handed out and taken back; the tensors grow by doubling when rows or columns run out.

    Attributes:
        tokens: int64 [rows, columns]; cells after a row's end repeat its first token.
        lengths: Prompt plus output tokens of each row, int64 [rows].
        output_starts: Prompt tokens of each row, int64 [rows].
        counts: Occurrences of each token in the output, float32 [rows, V] (exact up to 2**24), so that they
            enter the arithmetic of the penalties without a conversion.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._row_of_slot: dict[int, int] = {}
        self._free: list[int] = []
        self._lengths: list[int] = []
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.output_starts = torch.zeros(0, dtype=torch.int64, device=device)
        self.counts = torch.zeros(0, vocab_size, device=device)

    def add(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Start tracking ``slot``; ``prompt`` must not be empty."""
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        self._row_of_slot[slot] = row
        ids = torch.tensor([*prompt, *output], dtype=torch.int64, device=self._device)
        self._lengths[row] = len(ids)
        self._grow_columns(len(ids))
        self.tokens[row] = ids[0]
        self.tokens[row, : len(ids)] = ids
        self.lengths[row] = len(ids)
        self.output_starts[row] = len(prompt)
        self.counts[row] = 0.0
        self.counts[row].index_add_(0, ids[len(prompt) :], torch.ones(len(output), device=self._device))

    def remove(self, slot: int) -> None:
        """Stop tracking ``slot``; nothing happens when it is not tracked."""
        row = self._row_of_slot.pop(slot, None)
        if row is not None:
            self._free.append(row)
            self._lengths[row] = 0

    def row(self, slot: int) -> int:
        """The row of a tracked slot."""
        return self._row_of_slot[slot]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self._lengths)

    def make_room(self, slots: Sequence[int]) -> None:
        """Let each of the tracked ``slots`` have one more token, which is written to the tensors next."""
        for slot in slots:
            self._lengths[self._row_of_slot[slot]] += 1
        self._grow_columns(self.longest)

    def append(self, slots: Sequence[int], rows: Tensor, token_ids: Tensor) -> None:
        """Add one output token to each of the tracked ``slots``, whose rows are ``rows`` (int64 [R])."""
        self.make_room(slots)
        self.tokens[rows, self.lengths[rows]] = token_ids
        self.lengths[rows] += 1
        self.counts.index_put_((rows, token_ids), torch.ones(len(rows), device=self._device), accumulate=True)

    def seen(self, rows: Tensor) -> Tensor:
        """Ids seen by each of ``rows``, with repetitions, int64 [R, longest]."""
        return self.tokens[rows, : self.longest]

    def tails(self, rows: Tensor, width: int) -> Tensor:
        """The latest ``width`` output tokens of ``rows``, oldest first, -2 where there are fewer: int64 [R, width]."""
        positions = self.lengths[rows, None] + torch.arange(-width, 0, device=self._device)
        tails = self.tokens[rows[:, None], positions.clamp(min=0)]
        return tails.masked_fill_(positions < self.output_starts[rows, None], -2)

    def _grow_rows(self) -> None:
        old = len(self._lengths)
        new = max(4, old)
        self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(new, self.tokens.shape[1])])
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(new)])
        self.output_starts = torch.cat([self.output_starts, self.output_starts.new_zeros(new)])
        self.counts = torch.cat([self.counts, self.counts.new_zeros(new, self.counts.shape[1])])
        self._lengths += [0] * new
        self._free += range(old + new - 1, old - 1, -1)

    def _grow_columns(self, needed: int) -> None:
        rows, columns = self.tokens.shape
        if needed > columns:
            wider = torch.zeros(rows, max(needed, 2 * columns, 64), dtype=torch.int64, device=self._device)
            if columns:
                wider[:] = self.tokens[:, :1]
                wider[:, :columns] = self.tokens
            self.tokens = wider

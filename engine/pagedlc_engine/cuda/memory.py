"""How much of the card an engine may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MemoryBudget"]

#: Left free beyond what was measured: libraries' workspaces, launches of sizes not seen before.
_RESERVE = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A share of a card.

    Args:
        device: The card.
        limit: Bytes the engine may use in all.
        free_before: Bytes that were free before the engine took any.
    """

    device: torch.device
    limit: int
    free_before: int

    @classmethod
    def of(cls, device: torch.device, utilization: float) -> MemoryBudget:
        """The share ``utilization`` of the whole card, or what others have left of it."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(device, min(int(utilization * total), free), free)

    @property
    def used(self) -> int:
        """Bytes taken since the engine began."""
        return self.free_before - torch.cuda.mem_get_info(self.device)[0]

    def left(self, activations: int) -> int:
        """Bytes for the KV cache: steps need their activations twice, in the graphs' memory and outside."""
        return self.limit - self.used - 2 * activations - _RESERVE

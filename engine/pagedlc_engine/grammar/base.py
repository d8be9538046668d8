"""What the engine needs of a grammar while an answer is made."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["MaskRow", "TokenMatcher", "mask_words"]

#: One bit per token id, lowest first, in 32-bit words: int32 [W]. A set bit allows the token.
MaskRow = npt.NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """W, the number of 32-bit words that hold one bit per token."""
    return -(-vocab_size // 32)


class TokenMatcher(Protocol):
    """Follows one answer through its grammar. It depends on nothing but the tokens it has accepted."""

    @property
    def complete(self) -> bool:
        """True when the answer is well-formed and nothing but its end may follow."""

    def accept(self, token_id: int) -> str | None:
        """Take in the answer's next token; returns what is wrong, if it cannot follow."""

    def fill(self, row: MaskRow) -> str | None:
        """Write which tokens may come next into ``row``; returns what is wrong, if that cannot be found out."""

    def copy(self) -> Any:
        """A matcher in the same state that goes its own way."""

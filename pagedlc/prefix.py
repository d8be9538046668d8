"""Why a prompt hits the prefix cache, or does not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedlc.tokenizer import Tokenizer

__all__ = ["PrefixExplanation", "PrefixHistory", "explain"]

#: Tokens shown before and after the first difference.
CONTEXT_BEFORE = 12
CONTEXT_AFTER = 12


@dataclass(frozen=True, slots=True)
class PrefixExplanation:
    """How much of a prompt the prefix cache would serve, and where and why it stops.

    Args:
        num_tokens: Tokens of the prompt.
        num_cached_tokens: Tokens that would come from the cache now.
        num_common_tokens: Tokens that the prompt shares with the most similar earlier request.
        earlier_text: That request's text around the first difference, or ``None`` where there is no difference.
        this_text: This prompt's text there.
        reason: What limits the hit, in words.
    """

    num_tokens: int
    num_cached_tokens: int
    num_common_tokens: int
    earlier_text: str | None
    this_text: str | None
    reason: str

    def __str__(self) -> str:
        lines = [
            f"{self.num_cached_tokens} of {self.num_tokens} prompt tokens would come from the cache. {self.reason}"
        ]
        if self.earlier_text is not None:
            lines += [f"  earlier: {self.earlier_text!r}", f"  this:    {self.this_text!r}"]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Entry:
    salt: str | None
    tokens: npt.NDArray[np.int32]


class PrefixHistory:
    """Tokens of the latest requests, answers included; what a new prompt can be compared with.

    Args:
        capacity: How many requests to remember.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._entries: deque[_Entry] = deque(maxlen=capacity)
        # Reentrant: the garbage collector may end a stream, which adds its request, while one is added.
        self._lock = threading.RLock()

    def add(self, prompt: Sequence[int], answer: Sequence[int], salt: str | None) -> None:
        """Remember a request."""
        entry = _Entry(salt, np.concatenate([np.asarray(part, dtype=np.int32) for part in (prompt, answer)]))
        with self._lock:
            self._entries.append(entry)

    def nearest(self, token_ids: Sequence[int], salt: str | None) -> tuple[int, list[int]] | None:
        """The remembered request of the same salt that shares most leading tokens: how many, and its tokens."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        with self._lock:
            entries = [entry for entry in self._entries if entry.salt == salt]
        if not entries:
            return None
        common, nearest = max(((_common(tokens, entry.tokens), entry) for entry in entries), key=lambda pair: pair[0])
        return common, nearest.tokens.tolist()


def _common(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def explain(
    token_ids: Sequence[int],
    salt: str | None,
    cached: int,
    history: PrefixHistory,
    tokenizer: Tokenizer,
    block_size: int,
) -> PrefixExplanation:
    """Compare a prompt with earlier requests.

    Args:
        token_ids: The prompt.
        salt: Its cache salt.
        cached: Tokens the cache would serve.
        history: Earlier requests.
        tokenizer: Writes the tokens around the difference.
        block_size: Tokens per KV block; only whole blocks are shared.
    """
    found = history.nearest(token_ids, salt)
    common, earlier = found if found is not None else (0, [])
    differs = common < min(len(token_ids), len(earlier))
    return PrefixExplanation(
        num_tokens=len(token_ids),
        num_cached_tokens=cached,
        num_common_tokens=common,
        earlier_text=_around(tokenizer, earlier, common) if differs else None,
        this_text=_around(tokenizer, token_ids, common) if differs else None,
        reason=_reason(len(token_ids), cached, common, found is not None, differs, block_size),
    )


def _around(tokenizer: Tokenizer, token_ids: Sequence[int], at: int) -> str:
    return tokenizer.decode(token_ids[max(0, at - CONTEXT_BEFORE) : at + CONTEXT_AFTER], skip_special_tokens=False)


def _reason(total: int, cached: int, common: int, any_earlier: bool, differs: bool, block_size: int) -> str:
    most = min(total // block_size * block_size, total - 1)
    if cached == most:
        return f"That is all that can: whole blocks of {block_size} tokens, and the last token is always computed."
    if not any_earlier:
        return "No earlier request is remembered to compare with."
    if cached < min(common, most) // block_size * block_size:
        return (
            f"The first {common} tokens were computed before, but the rest of their blocks has left the cache, which "
            "was reset or too small (kv_cache_memory_bytes)."
        )
    if differs:
        return f"Token {common} differs from the most similar earlier request:"
    return f"The most similar earlier request ends after {common} tokens; only whole blocks of {block_size} are shared."

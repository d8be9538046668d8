"""Hash chains that name the contents of KV blocks.

A block's key covers its own tokens and, through its parent's key, all tokens before it, so equal keys mean
equal KV contents (the scheme of vLLM's automatic prefix caching). Keys are 16-byte BLAKE2b digests
(RFC 7693): wide enough that one tenant cannot forge another's block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

__all__ = ["LatestChains", "hash_block", "root_key"]

DIGEST_BYTES = 16
_TOKEN_BYTES = 4


def root_key(cache_salt: str | None = None, extra_keys: Iterable[str] = ()) -> bytes:
    """The parent of a sequence's first block: what its KV depends on besides its tokens."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in ("salt" if cache_salt is None else f"salt={cache_salt}", *extra_keys):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of one full block that follows the block with key ``parent``."""
    return hashlib.blake2b(_as_bytes(token_ids), key=parent, digest_size=DIGEST_BYTES).digest()


class LatestChains:
    """Computes prompts' chains and remembers the latest ones: a conversation's next prompt begins with its last one,
    and questions on one document with the document. Safe to use from many threads.

    Args:
        block_size: Tokens per block.
        capacity: How many chains to remember, of as many different first blocks.
    """

    def __init__(self, block_size: int, capacity: int = 16) -> None:
        self._stride = block_size * _TOKEN_BYTES
        self._capacity = capacity
        # Each of the three operations on it is one step to other threads.
        self._known: OrderedDict[tuple[bytes, bytes], tuple[bytes, list[bytes]]] = OrderedDict()

    def hash_blocks(self, root: bytes, token_ids: array[int]) -> tuple[bytes, ...]:
        """Keys of all full blocks of ``token_ids`` (int32), in order; a partial last block has none."""
        stride = self._stride
        data = token_ids.tobytes()
        if len(data) < stride:
            return ()
        begin = (root, data[:stride])
        earlier, keys = self._known.pop(begin, (b"", []))
        same = _common_bytes(earlier, data) // stride
        keys = keys[:same]
        keys += _chain(keys[-1] if keys else root, data, same * stride, stride)
        self._known[begin] = data, keys
        if len(self._known) > self._capacity:
            with suppress(KeyError):  # other threads may have taken all the rest out meanwhile
                self._known.popitem(last=False)
        return tuple(keys)


def _chain(parent: bytes, data: bytes, first: int, stride: int) -> list[bytes]:
    keys = []
    for start in range(first, len(data) - stride + 1, stride):
        parent = hashlib.blake2b(data[start : start + stride], key=parent, digest_size=DIGEST_BYTES).digest()
        keys.append(parent)
    return keys


def _common_bytes(first: bytes, second: bytes) -> int:
    """How many bytes of whole tokens two prompts have in common at their beginning."""
    length = min(len(first), len(second))
    differ = np.frombuffer(first[:length], np.int32) != np.frombuffer(second[:length], np.int32)
    at = int(differ.argmax()) if length else 0
    return at * _TOKEN_BYTES if length and differ[at] else length


def _as_bytes(token_ids: Sequence[int]) -> memoryview:
    return np.asarray(token_ids, dtype=np.int32).data.cast("B")

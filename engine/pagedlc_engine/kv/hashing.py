"""Hash chains that name the contents of KV blocks.

A block's key covers its own tokens and, through its parent's key, all tokens before it, so equal keys mean
equal KV contents (the scheme of vLLM's automatic prefix caching). Keys are 16-byte BLAKE2b digests
(RFC 7693): wide enough that one tenant cannot forge another's block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["hash_block", "hash_blocks", "root_key"]

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


def hash_blocks(root: bytes, token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Keys of all full blocks of ``token_ids``, in order; a partial last block has none."""
    data = _as_bytes(token_ids)
    stride = block_size * _TOKEN_BYTES
    keys = []
    parent = root
    for start in range(0, len(data) - stride + 1, stride):
        parent = hashlib.blake2b(data[start : start + stride], key=parent, digest_size=DIGEST_BYTES).digest()
        keys.append(parent)
    return tuple(keys)


def _as_bytes(token_ids: Sequence[int]) -> memoryview:
    return np.asarray(token_ids, dtype=np.int32).data.cast("B")

"""Chains computed with the help of earlier ones are the same chains."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pagedlc_engine.kv.hashing import LatestChains, hash_block, root_key

BLOCK = 4
#: Few different tokens, so that prompts begin alike.
PROMPTS = st.lists(st.integers(0, 1), max_size=30)


def chain(root: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Block by block."""
    keys = [root]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        keys.append(hash_block(keys[-1], tokens[start : start + BLOCK]))
    return tuple(keys[1:])


@given(st.lists(st.tuples(PROMPTS, st.sampled_from([None, "tenant"])), max_size=20), st.integers(1, 3))
def test_every_chain_is_what_it_is_by_itself(prompts: list[tuple[list[int], str | None]], capacity: int) -> None:
    chains = LatestChains(BLOCK, capacity)
    for tokens, salt in prompts:
        root = root_key(salt)
        assert chains.hash_blocks(root, array("i", tokens)) == chain(root, tokens)


def test_a_prompt_that_is_changed_afterwards_does_not_spoil_the_next_one() -> None:
    chains = LatestChains(BLOCK)
    tokens = array("i", range(12))
    chains.hash_blocks(root_key(), tokens)
    tokens[6] = 99
    assert chains.hash_blocks(root_key(), tokens) == chain(root_key(), tokens)

"""Chains computed with the help of earlier ones are the same chains."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pagedlc_engine.kv.hashing import LatestChains, hash_blocks, root_key

BLOCK = 4
#: Few different tokens, so that prompts begin alike.
PROMPTS = st.lists(st.integers(0, 1), max_size=30)


@given(st.lists(st.tuples(PROMPTS, st.sampled_from([None, "tenant"])), max_size=20), st.integers(1, 3))
def test_every_chain_is_what_it_is_by_itself(prompts: list[tuple[list[int], str | None]], capacity: int) -> None:
    chains = LatestChains(BLOCK, capacity)
    for tokens, salt in prompts:
        root = root_key(salt)
        assert chains.hash_blocks(root, array("i", tokens)) == hash_blocks(root, tokens, BLOCK)


def test_a_prompt_that_is_changed_afterwards_does_not_spoil_the_next_one() -> None:
    chains = LatestChains(BLOCK)
    tokens = array("i", range(12))
    chains.hash_blocks(root_key(), tokens)
    tokens[6] = 99
    assert chains.hash_blocks(root_key(), tokens) == hash_blocks(root_key(), tokens, BLOCK)

"""The block pool against a model that keeps everything in plain lists."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedlc_engine.kv.block_pool import BlockPool
from pagedlc_engine.kv.hashing import LatestChains, hash_block, root_key


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, share, release, register; the model is a list of tables and a dict of contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.tables: list[list[int]] = []
        self.contents: dict[bytes, int] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        for table in self.tables:
            assert not set(blocks) & set(table)
        self.contents = {key: block for key, block in self.contents.items() if block not in blocks}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table))

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.contents)))
        (block,) = self.pool.lookup_chain([key])
        assert block == self.contents[key]
        self.pool.share([block])
        self.tables.append([block])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.integers(0, 5))
    def register(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        key = bytes([name])
        self.pool.register(block, key)
        if key not in self.contents and block not in self.contents.values():
            self.contents[key] = block

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.contents.clear()

    @invariant()
    def counts_are_exact(self) -> None:
        held = [block for table in self.tables for block in table]
        for block in range(1, 8):
            assert self.pool.ref_count(block) == held.count(block)
            assert self.pool.is_free(block) == (block not in held)
        assert self.pool.num_free == 7 - len(set(held))
        assert self.pool.num_cached == len(self.contents)
        for key, block in self.contents.items():
            assert self.pool.lookup_chain([key]) == [block]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, deadline=None)


def test_blocks_without_contents_are_reused_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(5)
    first, second, third, _plain = pool.allocate(4)
    for name, block in ((b"1", first), (b"2", second), (b"3", third)):
        pool.register(block, name)
    pool.release([second])
    pool.release([first])
    pool.release([_plain])
    pool.release([third])
    assert pool.allocate(1) == [_plain]
    assert pool.allocate(3) == [second, first, third]


def test_releasing_a_free_block_is_an_error() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="free already"):
        pool.release([block])


def test_keys_depend_on_tokens_on_everything_before_and_on_the_salt() -> None:
    def hash_blocks(root: bytes, tokens: list[int]) -> tuple[bytes, ...]:
        return LatestChains(16).hash_blocks(root, array("i", tokens))

    tokens = list(range(64))
    keys = hash_blocks(root_key(), tokens)
    assert len(keys) == len(set(keys)) == 4
    assert hash_blocks(root_key(), [*tokens, 1, 2]) == keys
    assert hash_blocks(root_key(), [9, *tokens[1:]])[3] != keys[3]
    assert hash_blocks(root_key("tenant"), tokens)[0] != keys[0]
    assert hash_blocks(root_key(None, ["adapter"]), tokens)[0] != keys[0]
    assert root_key("a", ["b"]) != root_key("ab", [""])
    assert hash_block(keys[0], tokens[16:32]) == keys[1]

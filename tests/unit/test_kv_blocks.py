"""The block pool under random histories: every block is free, earmarked, kept or in use, and never two of these."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.kv_blocks import BlockContent, BlockPool, BlockTable, KVCacheError


def content(key: bytes, before: bytes = b"", token_ids: tuple[int, ...] = ()) -> BlockContent:
    return BlockContent(key, before, token_ids)


class PoolHistory(RuleBasedStateMachine):
    """Two pools that are asked the same: they must hand out the same blocks."""

    @initialize(num_blocks=st.integers(1, 24))
    def begin(self, num_blocks: int) -> None:
        self.pools = [BlockPool(num_blocks) for _ in range(2)]
        self.tables: dict[int, list[BlockTable]] = {}
        self.next_id = 0
        self.keys = 0

    def _draw(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tables)))

    @rule(count=st.integers(0, 9), ahead=st.integers(0, 6))
    def open(self, count: int, ahead: int) -> None:
        self.next_id += 1
        self.tables[self.next_id] = [BlockTable(self.next_id) for _ in self.pools]
        self._take(self.next_id, count, ahead)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(0, 3), ahead=st.integers(0, 6))
    def grow(self, data: st.DataObject, count: int, ahead: int) -> None:
        self._take(self._draw(data), count, ahead)

    def _take(self, owner: int, count: int, ahead: int) -> None:
        for pool, table in zip(self.pools, self.tables[owner], strict=True):
            before, free = list(table.blocks), pool.available
            if count > free:
                with pytest.raises(KVCacheError, match=f"sequence {owner} needs {count} blocks, {free} are available"):
                    pool.take(table, count, ahead)
                assert table.blocks == before
                continue
            pool.take(table, count, ahead)
            assert table.blocks[: len(before)] == before
            assert len(table) == len(before) + count
            assert all(pool.references(block) == 1 for block in table.blocks[len(before) :])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), length=st.integers(1, 4))
    def share_with_a_newcomer(self, data: st.DataObject, length: int) -> None:
        owner = self._draw(data)
        self.next_id += 1
        self.tables[self.next_id] = [BlockTable(self.next_id) for _ in self.pools]
        for pool, table, source in zip(self.pools, self.tables[self.next_id], self.tables[owner], strict=True):
            pool.share(table, source.blocks[:length])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        owner, at = self._draw(data), data.draw(st.integers(0, 8))
        self.keys += 1
        for pool, table in zip(self.pools, self.tables[owner], strict=True):
            if at < len(table):
                pool.remember(table.blocks[at], content(bytes([self.keys % 256, self.keys // 256])))

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        key = data.draw(st.integers(0, self.keys))
        found = [pool.find(bytes([key % 256, key // 256])) for pool in self.pools]
        assert found[0] == found[1]
        if found[0] is not None:
            self.next_id += 1
            self.tables[self.next_id] = [BlockTable(self.next_id) for _ in self.pools]
            for pool, table in zip(self.pools, self.tables[self.next_id], strict=True):
                pool.share(table, [found[0]])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        owner = self._draw(data)
        for pool, table in zip(self.pools, self.tables.pop(owner), strict=True):
            for block in table.blocks if forget else ():
                pool.forget(block)
            pool.release(table)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "pools"):
            return
        assert [[table.blocks for table in pair] for pair in self.tables.values()] == [
            [pair[0].blocks] * 2 for pair in self.tables.values()
        ]
        pool, tables = self.pools[0], [pair[0] for pair in self.tables.values()]
        referred = Counter(block for table in tables for block in table.blocks)
        assert {block: pool.references(block) for block in range(pool.num_blocks)} == {
            block: referred[block] for block in range(pool.num_blocks)
        }
        earmarked = [block for table in tables for block in range(table.next_block, table.earmark_stop) if table.blocks]
        assert len(set(earmarked)) == len(earmarked)
        kept = list(pool._unreferenced)
        assert pool.used == len(referred)
        assert pool.cached == len(kept)
        assert pool.available == pool.num_blocks - len(referred)
        assert {pool._states[block] for block in referred} <= {3}
        assert {pool._states[block] for block in kept} <= {2}
        assert {pool._states[block] for block in earmarked} <= {1}
        assert Counter(pool._states) == Counter(
            {
                3: len(referred),
                2: len(kept),
                1: len(earmarked),
                0: pool.num_blocks - len(referred) - len(kept) - len(earmarked),
            }
        )
        assert {block: key for key, block in pool._block_of.items()} == {
            block: content.key for block, content in pool._content_of.items()
        }
        assert sorted(block for blocks in pool._following.values() for block in blocks) == sorted(pool._content_of)
        for table in tables:
            assert [block for first, count in table.runs for block in range(first, first + count)] == table.blocks

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        for pair in self.tables.values():
            self.pools[0].release(pair[0])
        assert self.pools[0].used == 0
        table = BlockTable(0)
        self.pools[0].take(table, self.pools[0].num_blocks, 0)
        assert sorted(table.blocks) == list(range(self.pools[0].num_blocks))


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def filled(pool: BlockPool, owner: int, count: int, ahead: int = 0) -> BlockTable:
    table = BlockTable(owner)
    pool.take(table, count, ahead)
    return table


def test_a_sequence_that_grows_beside_others_has_one_run() -> None:
    pool = BlockPool(64)
    tables = [filled(pool, owner, 3, ahead=10) for owner in range(4)]
    for _ in range(10):
        for table in tables:
            pool.take(table, 1, 10)
    assert [len(table.runs) for table in tables] == [1] * 4


def test_earmarks_are_given_up_before_anybody_goes_without() -> None:
    pool = BlockPool(10)
    first = filled(pool, 0, 1, ahead=5)
    second = filled(pool, 1, 1, ahead=5)
    assert (first.earmark_stop, second.earmark_stop) == (6, 10)
    filled(pool, 2, 8)
    assert pool.available == 0
    with pytest.raises(KVCacheError, match="sequence 0 needs 1 blocks, 0 are available"):
        pool.take(first, 1, 0)


def test_the_least_recently_used_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(12)
    for owner in range(3):
        table = filled(pool, owner, 4)
        for index, block in enumerate(table.blocks):
            pool.remember(block, content(bytes([owner, index])))
        pool.release(table)
    again = BlockTable(9)
    pool.share(again, [found for index in range(2) if (found := pool.find(bytes([0, index]))) is not None])
    pool.release(again)
    assert (pool.cached, pool.used) == (12, 0)
    filled(pool, 3, 2)
    kept = set(pool._block_of)
    assert {bytes([0, 2]), bytes([0, 3])}.isdisjoint(kept)
    assert {bytes([0, 0]), bytes([0, 1])} <= kept
    assert pool.evictions == 12 - len(kept)


def test_of_two_blocks_that_hold_the_same_the_first_is_found() -> None:
    pool = BlockPool(4)
    first, second = filled(pool, 0, 1), filled(pool, 1, 1)
    pool.remember(first.blocks[0], content(b"x"))
    pool.remember(second.blocks[0], content(b"x"))
    assert pool.find(b"x") == first.blocks[0]
    pool.release(second)
    assert (pool.cached, pool.available) == (0, 3)
    pool.forget(first.blocks[0])
    assert pool.find(b"x") is None


def test_the_block_that_begins_with_most_is_found() -> None:
    pool = BlockPool(4)
    blocks = filled(pool, 0, 4).blocks
    for block, tokens in zip(blocks, ((1, 2, 9), (1, 2, 3), (1, 8, 8)), strict=False):
        pool.remember(block, content(bytes(tokens), b"head", tokens))
    pool.remember(blocks[3], content(b"other", b"another head", (1, 2, 3)))
    assert pool.find_beginning(b"head", (1, 2, 3), ()) == (blocks[1], 3)
    assert pool.find_beginning(b"head", (1, 2), ()) == (blocks[1], 2)
    assert pool.find_beginning(b"head", (1, 2, 3), {blocks[1]}) == (blocks[0], 2)
    assert pool.find_beginning(b"head", (2, 2, 3), ()) == (-1, 0)
    assert pool.find_beginning(b"nothing", (1, 2, 3), ()) == (-1, 0)
    pool.forget(blocks[1])
    assert pool.find_beginning(b"head", (1, 2, 3), ()) == (blocks[0], 2)

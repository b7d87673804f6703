from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.pool import BlockPool, NewBlock


def new_pool(num_blocks: int, block_bytes: int = 4) -> BlockPool:
    return BlockPool(np.zeros((num_blocks, block_bytes), dtype=np.uint8))


def chain(name: str, length: int) -> list[NewBlock]:
    return [
        NewBlock(f"s-{name}{index}".encode(), f"p-{name}{index}".encode())
        for index in range(length)
    ]


def keys(blocks: list[NewBlock]) -> list[bytes]:
    return [block.storage_key for block in blocks]


def fill(pool: BlockPool, blocks: list[NewBlock], value: int = 1) -> int:
    places = pool.store(blocks, pool.match(keys(blocks)))
    for offset, place in enumerate(places):
        place[:] = value + offset
    return len(places)


def test_a_stored_chain_is_matched_and_read_back() -> None:
    pool = new_pool(4)
    blocks = chain("a", 3)

    assert fill(pool, blocks, value=7) == 3
    assert pool.match(keys(blocks)) == 3
    assert [int(place[0]) for place in pool.read(keys(blocks))] == [7, 8, 9]


def test_a_match_stops_at_the_first_gap() -> None:
    pool = new_pool(4)
    blocks = chain("a", 3)
    fill(pool, blocks)

    assert pool.match([blocks[0].storage_key, b"other", blocks[1].storage_key]) == 1


def test_eviction_takes_the_least_recently_used_chain_from_its_tail() -> None:
    pool = new_pool(4)
    old, young = chain("old", 2), chain("young", 2)
    fill(pool, old)
    fill(pool, young)
    pool.take_events()

    fill(pool, chain("new", 1))

    assert pool.match(keys(old)) == 1
    assert pool.match(keys(young)) == 2
    assert pool.take_events().evicted == [old[1].prefix_key]


def test_a_match_counts_as_use() -> None:
    pool = new_pool(4)
    first, second = chain("first", 2), chain("second", 2)
    fill(pool, first)
    fill(pool, second)
    pool.match(keys(first))

    fill(pool, chain("new", 2))

    assert pool.match(keys(first)) == 2
    assert pool.match(keys(second)) == 0


def test_a_chain_longer_than_the_pool_keeps_its_head() -> None:
    pool = new_pool(3)
    blocks = chain("long", 5)

    assert fill(pool, blocks) == 3
    assert pool.match(keys(blocks)) == 3


def test_a_reservation_evicts_cached_blocks_before_it_fails() -> None:
    pool = new_pool(4)
    fill(pool, chain("a", 4))

    assert pool.reserve(3)
    assert (pool.num_cached, pool.num_reserved) == (1, 3)
    assert not pool.reserve(2)
    assert (pool.num_cached, pool.num_reserved) == (1, 3)
    pool.check_integrity()


def test_releasing_more_than_is_reserved_is_refused() -> None:
    pool = new_pool(2)

    with pytest.raises(ValueError, match="0 reserved"):
        pool.release(1)


def test_a_stored_block_is_told_with_its_place_in_the_chain() -> None:
    pool = new_pool(4)
    blocks = chain("a", 3)
    fill(pool, blocks[:1])
    pool.take_events()

    fill(pool, blocks)
    stored = pool.take_events().stored

    assert [block.block_index for block in stored] == [1, 2]
    assert [block.prefix_key for block in stored] == [b"p-a1", b"p-a2"]
    assert [block.previous_key for block in stored] == [b"p-a0", b"p-a1"]
    assert all(block.generation == 1 for block in stored)


def test_events_are_net_of_what_came_and_went_unreported() -> None:
    pool = new_pool(1)
    first, second = chain("first", 1), chain("second", 1)
    fill(pool, first)
    fill(pool, second)

    events = pool.take_events()

    assert [block.prefix_key for block in events.stored] == [second[0].prefix_key]
    assert events.evicted == []


def test_a_block_that_returns_before_its_eviction_was_told_is_not_told_at_all() -> None:
    pool = new_pool(1)
    first, second = chain("first", 1), chain("second", 1)
    fill(pool, first)
    pool.take_events()
    fill(pool, second)
    fill(pool, first)

    assert pool.take_events() == ([], [])


class PoolAgainstItsEvents(RuleBasedStateMachine):
    """Whoever applies the events in order knows exactly what is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool(6)
        self.known: set[bytes] = set()

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 8))
    def store(self, name: str, length: int) -> None:
        fill(self.pool, chain(name, length))

    @rule(num_blocks=st.integers(1, 6))
    def reserve(self, num_blocks: int) -> None:
        before = self.pool.num_reserved
        taken = self.pool.reserve(num_blocks)
        assert taken == (before + num_blocks <= self.pool.num_blocks)

    @precondition(lambda self: self.pool.num_reserved)
    @rule()
    def release(self) -> None:
        self.pool.release(1)

    @rule()
    def report(self) -> None:
        events = self.pool.take_events()
        self.known.difference_update(events.evicted)
        self.known.update(block.prefix_key for block in events.stored)
        held = {
            block.prefix_key
            for name in "abc"
            for block in chain(name, 8)
            if self.pool.match([block.storage_key])
        }
        assert self.known == held

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()


TestPoolAgainstItsEvents = PoolAgainstItsEvents.TestCase


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5)), max_size=30))
def test_what_is_read_is_what_was_written(stores: list[tuple[str, int]]) -> None:
    pool = new_pool(5)
    values = {"a": 10, "b": 20, "c": 30, "d": 40}
    for name, length in stores:
        blocks = chain(name, length)
        have = pool.match(keys(blocks))
        for offset, place in enumerate(pool.store(blocks, have)):
            place[:] = values[name] + have + offset

        found = pool.match(keys(blocks))
        read = [int(place[0]) for place in pool.read(keys(blocks)[:found])]

        assert read == [values[name] + index for index in range(found)]

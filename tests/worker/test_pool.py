from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.pool import BlockPool, Claim, NewBlock


def new_pool(num_blocks: int, block_bytes: int = 4) -> BlockPool:
    return BlockPool(np.zeros((num_blocks, block_bytes), dtype=np.uint8))


def chain(name: str, length: int) -> list[NewBlock]:
    return [
        NewBlock(f"s-{name}{index}".encode(), f"p-{name}{index}".encode())
        for index in range(length)
    ]


def fill(pool: BlockPool, blocks: list[NewBlock], value: int = 1) -> int:
    places = pool.store(blocks, pool.match(blocks))
    for offset, place in enumerate(places):
        place[:] = value + offset
    return len(places)


def test_a_stored_chain_is_matched_and_read_back() -> None:
    pool = new_pool(4)
    blocks = chain("a", 3)

    assert fill(pool, blocks, value=7) == 3
    assert pool.match(blocks) == 3
    assert [int(place[0]) for place in pool.read(blocks)] == [7, 8, 9]


def test_a_match_stops_at_the_first_gap() -> None:
    pool = new_pool(4)
    blocks = chain("a", 3)
    fill(pool, blocks)

    assert pool.match([blocks[0], NewBlock(b"other", b"other"), blocks[1]]) == 1


def test_eviction_takes_the_least_recently_used_chain_from_its_tail() -> None:
    pool = new_pool(4)
    old, young = chain("old", 2), chain("young", 2)
    fill(pool, old)
    fill(pool, young)
    pool.take_events()

    fill(pool, chain("new", 1))

    assert pool.match(old) == 1
    assert pool.match(young) == 2
    assert pool.take_events().evicted == [old[1].prefix_key]


def test_a_match_counts_as_use() -> None:
    pool = new_pool(4)
    first, second = chain("first", 2), chain("second", 2)
    fill(pool, first)
    fill(pool, second)
    pool.match(first)

    fill(pool, chain("new", 2))

    assert pool.match(first) == 2
    assert pool.match(second) == 0


def test_a_chain_longer_than_the_pool_keeps_its_head() -> None:
    pool = new_pool(3)
    blocks = chain("long", 5)

    assert fill(pool, blocks) == 3
    assert pool.match(blocks) == 3


def test_a_claim_evicts_cached_blocks_before_it_fails() -> None:
    pool = new_pool(4)
    fill(pool, chain("a", 4))

    assert pool.claim([], 3) is not None
    assert (pool.num_cached, pool.num_reserved) == (1, 3)
    assert pool.claim([], 2) is None
    assert (pool.num_cached, pool.num_reserved) == (1, 3)
    pool.check_integrity()


def test_requests_that_share_cached_blocks_count_them_once() -> None:
    pool = new_pool(6)
    shared = chain("a", 3)
    fill(pool, shared)

    claims = [pool.claim(shared, 4) for _ in range(3)]

    assert [claim is not None for claim in claims] == [True] * 3
    assert (pool.num_cached, pool.num_pinned, pool.num_reserved) == (3, 3, 3)
    assert pool.claim(shared, 4) is None


def test_what_a_running_request_uses_is_not_evicted() -> None:
    pool = new_pool(4)
    used, idle = chain("used", 2), chain("idle", 2)
    fill(pool, used)
    claim = pool.claim(used, 2)
    assert claim is not None
    fill(pool, idle)

    assert pool.claim([], 3) is None
    assert pool.claim([], 2) is not None
    assert (pool.match(used), pool.match(idle)) == (2, 0)
    pool.release(claim)
    assert fill(pool, chain("new", 2)) == 2


def test_computed_blocks_move_from_the_room_for_them_into_the_cache() -> None:
    pool = new_pool(4)
    blocks = chain("a", 3)
    claim = pool.claim(blocks, 4)
    assert claim is not None

    first, places = pool.keep(claim, blocks[:2])

    assert (first, len(places)) == (0, 2)
    assert (pool.num_cached, pool.num_pinned, pool.num_reserved) == (2, 2, 2)
    assert pool.match(blocks) == 2
    assert [block.block_index for block in pool.take_events().stored] == [0, 1]
    assert pool.keep(claim, blocks).first == 2
    pool.check_integrity([claim])


def test_blocks_that_came_in_meanwhile_are_pinned_instead_of_room_for_them() -> None:
    pool = new_pool(8)
    blocks = chain("a", 3)
    first, second = pool.claim(blocks, 4), pool.claim(blocks, 4)
    assert first is not None
    assert second is not None
    pool.keep(first, blocks)

    pool.pin_more(second, blocks)

    assert (second.num_pinned, second.num_reserved) == (3, 1)
    assert pool.num_reserved == 2
    assert pool.keep(second, blocks).places == []
    pool.check_integrity([first, second])


def test_blocks_of_an_ended_request_leave_from_the_tail() -> None:
    pool = new_pool(4)
    blocks = chain("a", 3)
    claim = pool.claim(blocks, 4)
    assert claim is not None
    pool.keep(claim, blocks)
    pool.release(claim)
    pool.take_events()

    pool.claim([], 3)

    assert pool.match(blocks) == 1
    assert pool.take_events().evicted == [b"p-a2", b"p-a1"]


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
        self.claims: list[Claim] = []
        self.names: list[str] = []

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 8))
    def store(self, name: str, length: int) -> None:
        fill(self.pool, chain(name, length))

    @rule(name=st.sampled_from("abc"), length=st.integers(0, 5), more=st.integers(0, 3))
    def claim(self, name: str, length: int, more: int) -> None:
        """Takes what is to be had, and nothing otherwise."""
        blocks = chain(name, length)
        pinned = {key for each in self.claims for key in each.chain[: each.num_pinned]}
        needed = {*pinned, *blocks[: self.pool.length(blocks)]}
        num_new = length + more - self.pool.length(blocks)
        fits = len(needed) + self.pool.num_reserved + num_new <= self.pool.num_blocks
        before = self.pool.num_reserved
        claim = self.pool.claim(blocks, length + more)
        assert (claim is not None) == fits
        assert self.pool.num_reserved == before + (num_new if fits else 0)
        if claim is not None:
            self.claims.append(claim)
            self.names.append(name)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), length=st.integers(1, 8))
    def keep(self, data: st.DataObject, length: int) -> None:
        """Never takes more room than there was for it."""
        index = data.draw(st.integers(0, len(self.claims) - 1))
        claim = self.claims[index]
        before = self.pool.num_reserved + self.pool.num_pinned
        blocks = chain(self.names[index], max(length, claim.num_pinned))
        self.pool.keep(claim, blocks)
        assert self.pool.num_reserved + self.pool.num_pinned <= before
        assert self.pool.length(blocks[: claim.num_pinned]) == claim.num_pinned

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.claims) - 1))
        self.names.pop(index)
        self.pool.release(self.claims.pop(index))

    @rule()
    def report(self) -> None:
        events = self.pool.take_events()
        self.known.difference_update(events.evicted)
        self.known.update(block.prefix_key for block in events.stored)
        held = {
            block.prefix_key
            for name in "abc"
            for block in chain(name, 8)
            if self.pool.match([block])
        }
        assert self.known == held

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity(self.claims)


TestPoolAgainstItsEvents = PoolAgainstItsEvents.TestCase


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5)), max_size=30))
def test_what_is_read_is_what_was_written(stores: list[tuple[str, int]]) -> None:
    pool = new_pool(5)
    values = {"a": 10, "b": 20, "c": 30, "d": 40}
    for name, length in stores:
        blocks = chain(name, length)
        have = pool.match(blocks)
        for offset, place in enumerate(pool.store(blocks, have)):
            place[:] = values[name] + have + offset

        found = pool.match(blocks)
        read = [int(place[0]) for place in pool.read(blocks[:found])]

        assert read == [values[name] + index for index in range(found)]

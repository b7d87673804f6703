from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import POLICIES, EvictionPolicy, Lru, S3Fifo, SegmentedLru
from services.core.settings import EVICTION_POLICIES

NUM_BLOCKS = 20


def key(number: int) -> bytes:
    return number.to_bytes(2, "big")


class Cache:
    """Blocks without chains, the least worth going first."""

    def __init__(self, new_policy: Callable[[int], EvictionPolicy], num_blocks: int) -> None:
        self.policy = new_policy(num_blocks)
        self._num_blocks = num_blocks

    def use(self, number: int) -> bool:
        """Whether it was there; it is now."""
        if key(number) in self.policy:
            self.policy.touch(key(number))
            return True
        if len(self.policy) == self._num_blocks:
            self.policy.remove(next(self.policy.candidates()), evicted=True)
        self.policy.insert(key(number))
        return False

    def __contains__(self, number: int) -> bool:
        return key(number) in self.policy


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return POLICIES[request.param](NUM_BLOCKS)


def test_every_key_is_offered_however_many_are_turned_down(policy: EvictionPolicy) -> None:
    for number in range(NUM_BLOCKS):
        policy.insert(key(number))
    for number in range(0, NUM_BLOCKS, 3):
        policy.touch(key(number))

    offered = list(itertools.islice(policy.candidates(), 10 * NUM_BLOCKS))

    assert set(offered) == {key(number) for number in range(NUM_BLOCKS)}
    assert len(offered) < 10 * NUM_BLOCKS
    assert len(policy) == NUM_BLOCKS


def test_nothing_is_offered_where_nothing_is(policy: EvictionPolicy) -> None:
    assert list(policy.candidates()) == []


@given(
    name=st.sampled_from(sorted(POLICIES)),
    steps=st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from(["insert", "touch", "evict", "drop"]))
    ),
)
def test_a_policy_knows_exactly_the_keys_that_are_here(
    name: str, steps: list[tuple[int, str]]
) -> None:
    policy = POLICIES[name](4)
    here: set[bytes] = set()
    for number, step in steps:
        chosen = key(number)
        if step == "insert" and chosen not in here:
            policy.insert(chosen)
            here.add(chosen)
        elif step == "touch" and chosen in here:
            policy.touch(chosen)
        elif step == "evict" and here:
            turned_down = number % len(here)
            chosen = next(itertools.islice(policy.candidates(), turned_down, None))
            policy.remove(chosen, evicted=True)
            here.remove(chosen)
        elif step == "drop" and chosen in here:
            policy.remove(chosen, evicted=False)
            here.remove(chosen)

        assert len(policy) == len(here)
        assert all((key(each) in policy) == (key(each) in here) for each in range(9))
        assert set(policy.candidates()) == here


def test_lru_evicts_what_was_not_used_for_longest() -> None:
    cache = Cache(Lru, 3)
    for number in (1, 2, 3, 1, 4):
        cache.use(number)

    assert 2 not in cache
    assert 1 in cache


@pytest.mark.parametrize("new_policy", [SegmentedLru, S3Fifo])
def test_a_scan_does_not_push_out_what_is_used(
    new_policy: Callable[[int], EvictionPolicy],
) -> None:
    cache = Cache(new_policy, NUM_BLOCKS)
    for number in (*range(8), *range(8)):
        cache.use(number)
    for number in range(100, 200):
        cache.use(number)

    assert all(number in cache for number in range(8))


def test_a_scan_empties_an_lru() -> None:
    cache = Cache(Lru, NUM_BLOCKS)
    for number in (*range(8), *range(8), *range(100, 120)):
        cache.use(number)

    assert not any(number in cache for number in range(8))


def test_what_left_lately_is_proven_when_it_comes_again() -> None:
    cache = Cache(S3Fifo, NUM_BLOCKS)
    for number in range(NUM_BLOCKS + 1):
        cache.use(number)
    assert 0 not in cache
    cache.use(0)
    for number in range(100, 118):
        cache.use(number)

    assert 0 in cache


def test_ghosts_are_bounded() -> None:
    policy = S3Fifo(10)
    for number in range(1000):
        policy.insert(key(number))
        policy.remove(key(number), evicted=True)

    assert len(policy._gone) == 20


def test_every_policy_can_be_chosen() -> None:
    assert POLICIES.keys() == set(EVICTION_POLICIES)

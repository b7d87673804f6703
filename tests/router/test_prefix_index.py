from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.prefix_index import Holder, PrefixIndex, Reach, bits_of, short_keys
from tests.router.chains import chain, key, keys_of

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def reached(index: PrefixIndex, *path: int) -> dict[int, int]:
    """Blocks by the holder's bit."""
    found = index.match(chain(*path))
    by_bit = {bit: reach.num_blocks for reach in found for bit in bits_of(reach.mask)}
    assert len(by_bit) == sum(reach.mask.bit_count() for reach in found), "a holder is named twice"
    return by_bit


def test_says_how_much_of_a_prompt_each_holder_has() -> None:
    index = PrefixIndex(100)
    a, b, c = (index.join() for _ in range(3))
    index.hold(a, keys_of(1, 2, 3, 4))
    index.hold(b, keys_of(1, 2))
    index.hold(c, keys_of(9))

    assert reached(index, 1, 2, 3, 4, 5) == {a.bit: 4, b.bit: 2}
    assert reached(index, 1) == {a.bit: 1, b.bit: 1}
    assert reached(index, 7) == {}
    assert index.match(chain()) == []


def test_holders_that_have_the_same_are_named_together() -> None:
    index = PrefixIndex(100)
    holders = [index.join() for _ in range(5)]
    for holder in holders:
        index.hold(holder, keys_of(1, 2))

    assert index.match(chain(1, 2, 3)) == [Reach(2, sum(holder.mask for holder in holders))]


def test_what_is_dropped_is_there_no_more() -> None:
    index = PrefixIndex(100)
    holder = index.join()
    index.hold(holder, keys_of(1, 2, 3))
    index.drop(holder, [key(1, 2, 3), key(5)])

    assert reached(index, 1, 2, 3) == {holder.bit: 2}
    assert len(index) == 2


def test_what_is_on_its_way_counts_until_it_is_settled() -> None:
    index = PrefixIndex(100)
    holder = index.join()
    keys = short_keys(chain(1, 2))
    index.expect(holder, keys)
    index.expect(holder, keys)
    index.settle(holder, keys)
    assert reached(index, 1, 2) == {holder.bit: 2}

    index.settle(holder, keys)
    assert reached(index, 1, 2) == {}
    assert len(index) == 0


def test_what_is_held_outlives_its_expectation() -> None:
    index = PrefixIndex(100)
    holder = index.join()
    keys = short_keys(chain(1, 2))
    index.expect(holder, keys)
    index.hold(holder, keys_of(1))
    index.settle(holder, keys)

    assert reached(index, 1, 2) == {holder.bit: 1}


def test_a_holder_that_reports_more_than_it_can_have_has_what_it_told_last() -> None:
    index = PrefixIndex(100)
    holder, other = index.join(), index.join()
    index.hold(other, keys_of(1, 2))
    index.hold(holder, keys_of(1, 2, 3), most=4)
    index.hold(holder, keys_of(7, 8), most=4)

    assert reached(index, 1, 2, 3) == {holder.bit: 2, other.bit: 2}
    assert reached(index, 7, 8) == {holder.bit: 2}
    assert len(index) == 4
    index.check_integrity()


def test_a_holder_that_left_and_is_half_forgotten_keeps_the_index_whole() -> None:
    index = PrefixIndex(100)
    holder = index.join()
    index.hold(holder, keys_of(1))
    index.expect(holder, short_keys(chain(1)))
    index.leave(holder)
    index.sweep(1)
    index.check_integrity()

    index.sweep(1)
    index.check_integrity()
    assert len(index) == 0


def test_a_block_that_was_reported_and_evicted_is_expected_no_longer() -> None:
    index = PrefixIndex(100)
    holder = index.join()
    keys = short_keys(chain(1))
    index.expect(holder, keys)
    index.hold(holder, keys_of(1))
    index.drop(holder, keys_of(1))
    assert reached(index, 1) == {}

    index.settle(holder, keys)
    index.check_integrity()


def test_who_leaves_counts_no_more_and_is_forgotten_little_by_little() -> None:
    index = PrefixIndex(1000)
    gone, stays = index.join(), index.join()
    index.hold(gone, keys_of(*range(100)))
    index.hold(stays, keys_of(0))
    index.leave(gone)
    index.leave(gone)

    assert reached(index, *range(100)) == {stays.bit: 1}
    index.sweep(10)
    assert len(index) == 91  # another has one of the ten
    index.sweep(1000)
    assert len(index) == 1
    assert index.join().bit == gone.bit
    index.check_integrity()


def test_it_never_grows_beyond_its_bound() -> None:
    index = PrefixIndex(50)
    holder = index.join()
    for number in range(200):
        index.hold(holder, keys_of(number, 1, 2))
        assert len(index) <= 50
    index.check_integrity()
    assert index.num_dropped == 550
    assert reached(index, 199, 1, 2) == {holder.bit: 3}

    index.resize(5)
    assert len(index) == 5
    index.check_integrity()


def test_under_pressure_what_is_asked_for_stays() -> None:
    index = PrefixIndex(60)
    holder = index.join()
    index.hold(holder, keys_of(7, 7, 7))
    for number in range(100, 200):
        index.hold(holder, keys_of(number, 1, 2))
        assert reached(index, 7, 7, 7) == {holder.bit: 3}


def test_of_a_chain_the_tail_is_dropped_before_its_head() -> None:
    index = PrefixIndex(10)
    holder = index.join()
    index.hold(holder, keys_of(*range(10)))
    index.hold(holder, keys_of(100, 1, 2))

    assert reached(index, *range(10)) == {holder.bit: 7}


def test_a_holder_that_says_nothing_is_taken_to_drop_the_oldest() -> None:
    index = PrefixIndex(100)
    holder = index.join()
    for path in ((1, 2, 3), (4, 5), (1, 2, 9)):
        index.use(holder, chain(*path), len(path), most=5)

    assert reached(index, 1, 2, 9) == {holder.bit: 3}
    assert reached(index, 4, 5) == {holder.bit: 2}
    assert reached(index, 1, 2, 3) == {holder.bit: 2}
    index.check_integrity()


def test_ten_thousand_holders_of_the_same_blocks_share_their_masks() -> None:
    index = PrefixIndex(1000)
    holders = [index.join() for _ in range(10_000)]
    for holder in holders:
        index.hold(holder, keys_of(1, 2, 3))

    [(num_blocks, mask)] = index.match(chain(1, 2, 3))
    assert num_blocks == 3
    assert mask.bit_count() == 10_000


@given(st.integers(0, 1 << 70))
def test_bits_of_a_mask(mask: int) -> None:
    assert sum(1 << bit for bit in bits_of(mask)) == mask


class AgainstSets(RuleBasedStateMachine):
    """Holders that have whole beginnings, against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(10_000)
        self.held: dict[Holder, set[tuple[int, ...]]] = {}
        self.expected: dict[Holder, list[tuple[bytes, ...]]] = {}

    @rule()
    def join(self) -> None:
        holder = self.index.join()
        self.held[holder], self.expected[holder] = set(), []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), path=PATHS)
    def hold(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        holder = self._any(data)
        self.index.hold(holder, keys_of(*path))
        self.held[holder] |= {path[:length] for length in range(1, len(path) + 1)}
        # Reported: no longer expected by anybody.
        short = {each[:16] for each in keys_of(*path)}
        self.expected[holder] = [
            tuple(each for each in keys if each not in short) for keys in self.expected[holder]
        ]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), path=PATHS)
    def drop_a_tail(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        holder = self._any(data)
        tail = {each for each in self.held[holder] if each[: len(path)] == path}
        self.index.drop(holder, [key(*each) for each in sorted(tail)])
        self.held[holder] -= tail

    @precondition(lambda self: self.held)
    @rule(data=st.data(), path=PATHS)
    def expect(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        holder = self._any(data)
        keys = short_keys(chain(*path))
        self.index.expect(holder, keys)
        self.expected[holder].append(tuple(keys))

    @precondition(lambda self: any(self.expected.values()))
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([each for each, keys in self.expected.items() if keys]))
        self.index.settle(holder, self.expected[holder].pop(0))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), sweep=st.integers(0, 5))
    def leave(self, data: st.DataObject, sweep: int) -> None:
        holder = self._any(data)
        self.index.leave(holder)
        self.index.sweep(sweep)
        del self.held[holder], self.expected[holder]

    @rule(path=PATHS)
    def match(self, path: tuple[int, ...]) -> None:
        expected = {
            holder.bit: length for holder in self.held if (length := self._length(holder, path))
        }
        assert reached(self.index, *path) == expected

    @invariant()
    def holds_together(self) -> None:
        self.index.check_integrity()

    def _any(self, data: st.DataObject) -> Holder:
        return data.draw(st.sampled_from(list(self.held)))

    def _length(self, holder: Holder, path: tuple[int, ...]) -> int:
        coming = {each for keys in self.expected[holder] for each in keys}
        length = 0
        for each in short_keys(chain(*path)):
            if path[: length + 1] not in self.held[holder] and each not in coming:
                break
            length += 1
        return length


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("num_blocks", [1, 7, 1000])
def test_a_long_prompt_is_matched_in_few_looks(num_blocks: int) -> None:
    index = PrefixIndex(10_000)
    holder = index.join()
    index.hold(holder, keys_of(*range(num_blocks)))

    class Counting(bytes):
        looks = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            Counting.looks += 1
            return bytes(self)[at]

    assert reached(index, *range(num_blocks)) == {holder.bit: num_blocks}
    index.match(Counting(chain(*range(num_blocks), 5)))
    assert Counting.looks <= 2 + num_blocks.bit_length()

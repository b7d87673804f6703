from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefixes import Changes, Prefixes

KEYS = (b"a", b"b", b"c")


def test_a_prefix_is_told_when_its_first_block_comes_and_when_its_last_goes() -> None:
    prefixes = Prefixes()
    told = []
    for change in (prefixes.add, prefixes.add, prefixes.remove, prefixes.remove):
        change(b"a")
        told.append(prefixes.take_changes())

    nothing = Changes({}, {})
    assert told == [Changes({b"a": None}, {}), nothing, nothing, Changes({}, {b"a": None})]


def test_what_came_and_went_between_two_looks_is_not_told() -> None:
    prefixes = Prefixes()
    prefixes.add(b"here")
    prefixes.take_changes()
    prefixes.add(b"passing")
    prefixes.remove(b"passing")
    prefixes.remove(b"here")
    prefixes.add(b"here")

    assert prefixes.take_changes() == Changes({}, {})


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.booleans(), st.booleans())))
def test_whoever_follows_the_changes_knows_the_set(
    steps: list[tuple[bytes, bool, bool]],
) -> None:
    prefixes = Prefixes()
    counts: Counter[bytes] = Counter()
    followed: set[bytes] = set()
    for key, adds, looks in steps:
        if adds:
            prefixes.add(key)
            counts[key] += 1
        elif counts[key]:
            prefixes.remove(key)
            counts[key] -= 1
        prefixes.check_integrity(list(counts.elements()))
        if looks:
            changes = prefixes.take_changes()
            assert not followed & changes.stored.keys()
            assert followed >= changes.evicted.keys()
            followed = followed - changes.evicted.keys() | changes.stored.keys()
            assert followed == set(prefixes.keys)

"""The sorted collection below the queue, against a sorted list."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.ranking import Ranking


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "fold"]), st.integers(0, 30))),
)
@settings(deadline=None)
def test_agrees_with_a_sorted_list(script: list[tuple[str, int]]) -> None:
    # Of texts the order shows: what is folded out of order differs.
    ranking: Ranking[int, str] = Ranking(lambda first, second: first + second)
    known: dict[int, str] = {}
    for step, key in script:
        if step == "add" and key not in known:
            known[key] = f"{key} "
            ranking.add(key, known[key])
        elif step == "remove" and key in known:
            ranking.remove(key)
            del known[key]
        elif step == "remove":
            with pytest.raises(KeyError):
                ranking.remove(key)
        ranking.check_integrity()
        assert list(ranking) == sorted(known.items())
        assert ranking.first() == (known[min(known)] if known else None)
        expected = "".join(known[each] for each in sorted(known) if each <= key)
        assert (ranking.fold_to(key) or "") == expected
        assert ranking.fold() == ("".join(known[each] for each in sorted(known)) or None)
        assert len(ranking) == len(known)


class Counted:
    """A key that counts how often it is compared."""

    compared = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __lt__(self, other: Counted) -> bool:
        Counted.compared += 1
        return self.value < other.value

    def __gt__(self, other: Counted) -> bool:
        return other < self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


def test_takes_time_as_log_of_its_size() -> None:
    """Also where keys only rise, as those of requests do."""
    ranking: Ranking[Counted, int] = Ranking(lambda first, second: first + second)
    size = 20_000
    for number in range(size):
        ranking.add(Counted(number), 1)
    rng = random.Random(1)
    Counted.compared = 0
    for _ in range(1000):
        value = rng.randrange(size)
        ranking.fold_to(Counted(value + 0.5))
        ranking.remove(Counted(value))
        ranking.add(Counted(value), 1)

    assert Counted.compared / 1000 < 3 * 3 * size.bit_length()
    assert size.bit_length() * 10 < sys.getrecursionlimit()

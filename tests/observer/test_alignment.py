from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.core.tokens import TokenArray
from services.observer.alignment import (
    RUN_TOKENS,
    Difference,
    align,
    common_tokens,
    shingles,
)


def ids(*parts: range | list[int]) -> TokenArray:
    return np.array([token for part in parts for token in part], "<u4")


def test_prompts_that_differ_in_one_place_agree_again_behind_it() -> None:
    one = ids(range(100), [900, 901], range(200, 300))
    other = ids(range(100), [800, 801, 802], range(200, 300))
    alignment = align(one, other)

    assert alignment.differences == (Difference(100, 102, 100, 103),)
    assert (alignment.end, alignment.other_end) == (202, 203)
    assert alignment.agreed_behind(102) == 100
    assert alignment.agreed_tokens == 200


def test_what_only_one_has_is_a_difference_too() -> None:
    one = ids(range(50), range(200, 300))
    other = ids(range(50), [900, 901], range(200, 300))

    assert align(one, other).differences == (Difference(50, 50, 50, 52),)
    assert align(one, other).in_other(50, 50) == (50, 52)
    assert align(other, one).in_other(50, 52) == (50, 50)


def test_another_question_at_the_end_is_where_they_part() -> None:
    one = ids(range(100), range(500, 530), [1, 2, 3])
    other = ids(range(100), range(600, 640), [1, 2, 3])
    alignment = align(one, other)

    assert alignment.differences == ()
    assert alignment.end == alignment.other_end == 100


def test_a_few_tokens_that_happen_to_be_the_same_are_no_agreement() -> None:
    alike = range(200, 200 + RUN_TOKENS - 1)
    assert align(ids(range(50), [900], alike), ids(range(50), [901], alike)).differences == ()


short = st.lists(st.integers(0, 3), max_size=6)


@given(st.lists(st.tuples(st.integers(RUN_TOKENS, 40), short, short), min_size=1, max_size=5))
def test_places_map_to_the_same_tokens(parts: list[tuple[int, list[int], list[int]]]) -> None:
    one: list[int] = []
    other: list[int] = []
    for number, (size, here, there) in enumerate(parts):
        same = [*range(100 * number + 10, 100 * number + 10 + size)]
        one += [*here, *same]
        other += [*there, *same]
    first, second = ids(one), ids(other)
    alignment = align(first, second)

    assert (alignment.end, alignment.other_end) == (len(first), len(second))
    position = other_position = 0
    for each in alignment.differences:
        agreed = first[position : each.start].tolist()
        assert agreed == second[other_position : each.other_start].tolist()
        assert alignment.in_other(each.start, each.end) == (each.other_start, each.other_end)
        for token in range(position + 1, each.start):
            place, _ = alignment.in_other(token, token)
            assert first[token] == second[place]
        position, other_position = each.end, each.other_end
    assert first[position:].tolist() == second[other_position:].tolist()
    backwards = align(second, first)
    assert backwards.agreed_tokens == alignment.agreed_tokens


@given(short, short)
def test_common_tokens_are_those_before_the_first_that_differs(
    one: list[int], other: list[int]
) -> None:
    count = common_tokens(ids(one), ids(other))
    assert one[:count] == other[:count]
    assert count in (len(one), len(other)) or one[count] != other[count]


def test_alike_prompts_have_most_runs_in_common_wherever_they_are() -> None:
    chance = np.random.default_rng(7)
    text = chance.integers(0, 50_000, 2_000).astype("<u4")
    shifted = ids([1, 2, 3], text.tolist())
    own, alike, unlike = (
        set(shingles(each).tolist())
        for each in (text, shifted, chance.integers(0, 50_000, 2_000).astype("<u4"))
    )
    assert 150 < len(own) < 350
    assert len(own & alike) > 0.95 * len(own)
    assert not own & unlike
    assert not len(shingles(text[: RUN_TOKENS - 1]))

"""Comparisons of samples, against counting every pair."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.observer.statistics import mann_whitney, mean, quantile, rank_correlation

samples = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(samples, samples)
def test_superiority_is_the_share_of_pairs(first: list[int], second: list[int]) -> None:
    wins = sum((b > a) + 0.5 * (b == a) for a in first for b in second)
    test = mann_whitney(first, second)
    assert test.superiority == pytest.approx(wins / len(first) / len(second))
    assert 0 <= test.p <= 1
    assert mann_whitney(second, first).p == pytest.approx(test.p)


def test_noise_is_called_a_difference_as_often_as_p_says() -> None:
    chance = random.Random(2)
    ps = [
        mann_whitney(
            [chance.expovariate(1) for _ in range(40)], [chance.expovariate(1) for _ in range(40)]
        ).p
        for _ in range(400)
    ]
    assert 0.02 <= sum(p < 0.05 for p in ps) / len(ps) <= 0.09


def test_a_real_difference_is_seen() -> None:
    chance = random.Random(3)
    slow = [2 * chance.expovariate(1) for _ in range(100)]
    fast = [chance.expovariate(1) for _ in range(100)]
    test = mann_whitney(slow, fast)
    assert test.p < 0.001
    assert test.superiority < 0.45


def test_equal_values_are_no_difference() -> None:
    assert mann_whitney([1.0] * 10, [1.0] * 10) == (0.5, 1.0)


def test_ranks_follow_order_and_nothing_else() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [9, 5, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0.0


def test_of_nothing_there_is_no_quantile() -> None:
    assert math.isnan(quantile([], 0.5))
    assert mean([]) == 0.0
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([3, 1, 2], 1.0) == 3

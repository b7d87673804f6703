from __future__ import annotations

import pytest

from kvstore.redis_rates import HALF_LIFE_S, MovingRatio


def test_without_observations_it_is_zero() -> None:
    assert MovingRatio(half_life_weight=1).value == 0


def test_one_observation_is_the_ratio_and_stays_it() -> None:
    ratio = MovingRatio(half_life_weight=1)
    ratio.observe(100, 0.5, now_s=1000)

    assert ratio.value == 200


def test_large_observations_weigh_more_than_small_ones() -> None:
    ratio = MovingRatio(half_life_weight=1e9)
    ratio.observe(900, 9, now_s=0)
    ratio.observe(200, 1, now_s=0)

    assert ratio.value == pytest.approx(110)


def test_after_a_half_life_old_and_new_count_two_to_one() -> None:
    ratio = MovingRatio(half_life_weight=1e9)
    ratio.observe(100, 1, now_s=0)
    ratio.observe(400, 1, now_s=HALF_LIFE_S)

    assert ratio.value == pytest.approx(300)


def test_a_change_shows_soon_in_a_busy_store() -> None:
    ratio = MovingRatio(half_life_weight=1)
    for _ in range(1000):
        ratio.observe(1000, 1, now_s=5)
    for _ in range(8):
        ratio.observe(10, 1, now_s=5)

    assert ratio.value < 20

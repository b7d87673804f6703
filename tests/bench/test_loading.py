from __future__ import annotations

import pytest

from services.bench import loading
from services.bench.loading import Row


def row(*, load_ms: float, compute_ms: float, auto_ms: float) -> Row:
    return Row(
        bytes_per_s=1e6,
        prompt_tokens=64,
        load_ms=load_ms,
        compute_ms=compute_ms,
        auto_ms=auto_ms,
        expected_load_ms=load_ms,
        expected_compute_ms=compute_ms,
        ways={"loaded": 1},
    )


def test_regret_is_measured_against_the_better_way_at_each_point() -> None:
    document = loading.summarize(
        [
            row(load_ms=100, compute_ms=400, auto_ms=110),
            row(load_ms=800, compute_ms=400, auto_ms=420),
        ]
    )

    assert document["regret"] == pytest.approx(30 / 500)
    assert document["auto_ratio"] == pytest.approx(530 / 500)
    assert document["load_ratio"] == pytest.approx(900 / 500)
    assert document["compute_ratio"] == pytest.approx(800 / 500)
    assert (document["loading_wins"], document["computing_wins"]) == (1, 1)


def test_being_faster_at_one_point_makes_up_for_nothing_at_another() -> None:
    document = loading.summarize(
        [
            row(load_ms=100, compute_ms=100, auto_ms=60),
            row(load_ms=100, compute_ms=400, auto_ms=140),
        ]
    )

    assert document["regret"] == pytest.approx(40 / 200)
    assert document["auto_ratio"] == 1.0


async def test_both_ways_win_on_their_side_of_the_crossover() -> None:
    document = await loading.measure(
        engine="simulated", lengths=(256,), ratios=(8.0, 0.125), num_rounds=1, pause_s=0.0
    )
    slow, fast = sorted(document["points"], key=lambda point: point["bytes_per_s"])

    assert document["engine"] == "simulated"
    assert fast["load_ms"] < fast["compute_ms"]
    assert slow["load_ms"] > slow["compute_ms"]
    assert fast["oracle_ms"] == fast["load_ms"]
    assert slow["oracle_ms"] == slow["compute_ms"]
    assert fast["expected_load_ms"] > 0
    assert sum(fast["ways"].values()) == sum(slow["ways"].values()) == 1
    assert document["regret"] >= 0
    assert len(document["adapting_ttft_ms"]) == 4

"""The figures are those of the traces' first analysis, by other code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.bench.oracle import Routed, cost_aware, round_robin, route
from services.bench.workload_traces import read_trace
from services.core.workload import Arrival


def routed(name: str, num_workers: int, *, by_cost: bool, num_blocks: int | None = None) -> Routed:
    workload = read_trace(name)
    return route(
        workload.arrivals,
        block_tokens=workload.block_tokens,
        num_workers=num_workers,
        num_blocks=num_blocks,
        choose=cost_aware if by_cost else round_robin,
    )


@pytest.mark.parametrize(
    ("name", "num_workers", "by_cost", "hit_rate"),
    [
        ("mooncake", 1, True, 0.347),
        ("mooncake", 2, False, 0.249),
        ("mooncake", 8, False, 0.123),
        ("mooncake", 16, False, 0.091),
        ("mooncake", 4, True, 0.288),
        ("mooncake", 8, True, 0.284),
        ("tau", 1, True, 0.961),
        ("tau", 2, False, 0.929),
        ("tau", 8, False, 0.823),
        ("tau", 2, True, 0.956),
        ("tau", 4, True, 0.949),
        ("tau", 8, True, 0.942),
    ],
)
def test_hit_rates_are_the_known_ones(
    name: str, num_workers: int, by_cost: bool, hit_rate: float
) -> None:
    assert routed(name, num_workers, by_cost=by_cost).hit_rate == pytest.approx(
        hit_rate, abs=0.0006
    )


def test_cost_aware_routing_spreads_the_work() -> None:
    mooncake = routed("mooncake", 8, by_cost=True)
    assert 0.99 < mooncake.least_work <= mooncake.most_work < 1.01
    assert routed("tau", 8, by_cost=True).most_work == pytest.approx(1.18, abs=0.01)


def test_smaller_caches_hit_less() -> None:
    rates = [
        routed("mooncake", 1, by_cost=True, num_blocks=size).hit_rate
        for size in (1_000, 5_000, 20_000, 50_000)
    ]
    # By another rule of which block of a prompt is the oldest: 0.044, 0.111, 0.282, 0.343.
    assert rates == pytest.approx([0.045, 0.120, 0.286, 0.345], abs=0.0006)


def chain(path: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(bytes(path[: end + 1]) for end in range(len(path)))


def test_each_request_is_at_one_worker() -> None:
    arrivals = [Arrival(0.0, chain([0, number]), 40, 1) for number in range(6)]
    result = route(arrivals, block_tokens=16, num_workers=3, choose=round_robin)

    assert result.requests == (2, 2, 2)
    assert result.uncached_tokens == (64, 64, 64)
    assert result.hit_rate == pytest.approx(3 * 16 / (6 * 40))

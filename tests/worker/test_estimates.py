from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.estimates import ComputeEstimate, ReadCost, ReadEstimate

# --- reading


@given(
    st.floats(0.0005, 0.1),
    st.floats(1e-4, 0.02),
    st.lists(st.integers(1, 128), min_size=20, max_size=40),
)
def test_an_estimate_converges_to_what_reads_take(
    latency_s: float, block_s: float, sizes: list[int]
) -> None:
    law = ReadCost(latency_s, block_s)
    told, hinted = ReadEstimate(), ReadEstimate()
    hinted.hint(ReadCost(latency_s, 1.0))
    for size in sizes:
        told.observe(size, law.of(size), 0.0, latency_s=latency_s)
        hinted.observe(size, law.of(size), 0.0)

    for estimate in (told, hinted):
        cost = estimate.cost

        assert cost is not None
        assert cost.of(100) == pytest.approx(law.of(100), rel=0.01)


@pytest.mark.parametrize("factor", [0.1, 50.0])
def test_two_reads_that_agree_overrule_all_before_them(factor: float) -> None:
    estimate = ReadEstimate()
    for _ in range(20):
        estimate.observe(10, 0.1, 0.0)
    for _ in range(2):
        estimate.observe(3, 0.03 * factor, 0.0)

    cost = estimate.cost

    assert cost is not None
    assert 0.5 < cost.of(10) / (0.1 * factor) < 2


def test_an_estimate_is_the_middle_of_what_scatters() -> None:
    source = random.Random(1)
    estimate = ReadEstimate()
    costs_s = []
    for _ in range(200):
        estimate.observe(10, 0.1 * source.uniform(0.7, 1.3), 0.0)
        assert estimate.cost is not None
        costs_s.append(estimate.cost.of(10))

    assert statistics.mean(costs_s) == pytest.approx(0.1, rel=0.1)
    assert 0.07 < min(costs_s) < max(costs_s) < 0.13


def test_one_slow_read_does_not_make_a_slow_tier() -> None:
    estimate = ReadEstimate()
    for _ in range(20):
        estimate.observe(10, 0.010, 0.0)
    estimate.observe(10, 5.0, 0.0)

    cost = estimate.cost

    assert cost is not None
    assert cost.of(10) < 0.025


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(0, 100.0), st.none() | st.floats(0, 100.0)),
        min_size=1,
        max_size=50,
    )
)
def test_an_estimate_is_never_negative_whatever_was_observed(
    reads: list[tuple[int, float, float | None]],
) -> None:
    estimate = ReadEstimate()
    for size, read_s, latency_s in reads:
        estimate.observe(size, read_s, 0.0, latency_s=latency_s)

        cost = estimate.cost

        assert cost is not None
        assert cost.latency_s >= 0
        assert cost.block_s >= 0
        assert math.isfinite(cost.of(500))


def test_what_others_measured_serves_until_something_was_read() -> None:
    estimate = ReadEstimate()
    estimate.hint(ReadCost(0.001, 0.1))
    hinted = estimate.cost
    estimate.observe(10, 0.011, 0.0)

    assert hinted == ReadCost(0.001, 0.1)
    assert estimate.cost is not None
    assert estimate.cost.of(100) == pytest.approx(0.101)


def test_waiting_in_vain_is_a_lesson_only_when_something_should_have_come() -> None:
    estimate = ReadEstimate()
    estimate.observe(10, 1.0, 0.0)
    before = estimate.cost
    estimate.observe_wait(0.05, 0.0)
    soon = estimate.cost
    for _ in range(2):
        estimate.observe_wait(3.0, 0.0)

    assert soon == before
    assert estimate.cost is not None
    assert estimate.cost.of(1) > 1.0


# --- computing

prompts = st.lists(st.tuples(st.integers(0, 1500), st.integers(16, 500)), min_size=1, max_size=40)


def law(start: int, num_tokens: int, *, base_s: float = 0.003, growth_s: float = 4e-6) -> float:
    """Seconds for tokens of which each costs more than the one before it."""
    return num_tokens * (base_s + growth_s * (start + num_tokens / 2))


def test_nothing_is_known_of_computing_before_the_first_prompt() -> None:
    assert ComputeEstimate().of(0, 100) is None


@given(prompts)
def test_prompts_of_all_lengths_tell_how_the_cost_grows(others: list[tuple[int, int]]) -> None:
    estimate = ComputeEstimate()
    for start, num_tokens in [*others, (0, 200), (0, 1500), (1000, 500), (500, 100)]:
        estimate.observe(start, num_tokens, law(start, num_tokens))

    for start, num_tokens in ((0, 100), (0, 2000), (1500, 200)):
        known_s = estimate.of(start, num_tokens)

        assert known_s == pytest.approx(law(start, num_tokens), rel=0.15)


def test_prompts_of_one_length_tell_nothing_of_growth() -> None:
    estimate = ComputeEstimate()
    for _ in range(10):
        estimate.observe(0, 400, 1.0)
        estimate.observe(0, 410, 1.2)

    assert estimate.of(0, 800) == pytest.approx(2 * 1.1, rel=0.05)


def test_an_engine_that_becomes_slower_is_followed() -> None:
    estimate = ComputeEstimate()
    for factor in [1.0] * 20 + [3.0] * 10:
        for start, num_tokens in ((0, 100), (0, 800)):
            estimate.observe(start, num_tokens, law(start, num_tokens) * factor)

    assert estimate.of(0, 500) == pytest.approx(3 * law(0, 500), rel=0.1)


def test_one_prompt_that_was_held_up_does_not_make_a_slow_engine() -> None:
    estimate = ComputeEstimate()
    for _ in range(10):
        estimate.observe(0, 300, 1.0)
    estimate.observe(0, 300, 60.0)

    known_s = estimate.of(0, 300)

    assert known_s is not None
    assert known_s < 2.0


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 2000), st.floats(0, 100.0))))
def test_no_token_is_ever_free(observed: list[tuple[int, int, float]]) -> None:
    estimate = ComputeEstimate()
    for start, num_tokens, compute_s in observed:
        estimate.observe(start, num_tokens, compute_s + 1e-6)
        known_s = estimate.of(0, 10)

        assert known_s is not None
        assert 0 < known_s < math.inf

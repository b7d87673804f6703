from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.estimates import ComputeEstimate, ReadCost, ReadEstimate

# --- reading


@given(
    st.floats(0.0005, 0.1),
    st.floats(1e-4, 0.02),
    st.lists(st.integers(1, 128), min_size=40, max_size=40),
)
def test_an_estimate_converges_to_what_reads_take(
    latency_s: float, block_s: float, sizes: list[int]
) -> None:
    law = ReadCost(latency_s, block_s)
    estimate = ReadEstimate()
    for size in sizes:
        estimate.observe(size, law.of(size), 0.0)

    cost = estimate.cost

    assert cost is not None
    for size in sizes[-5:]:  # what is long ago is forgotten
        assert cost.of(size) == pytest.approx(law.of(size), rel=0.25, abs=0.001)


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_an_estimate_follows_a_tier_that_changes(factor: float) -> None:
    source = random.Random(1)
    before, after = ReadCost(0.004, 0.002), ReadCost(0.004, 0.002 * factor)
    estimate = ReadEstimate()
    for law in (before, after):
        for _ in range(40):
            size = source.randint(4, 100)
            estimate.observe(size, law.of(size) * source.uniform(0.8, 1.2), 0.0)

    cost = estimate.cost

    assert cost is not None
    assert cost.of(50) == pytest.approx(after.of(50), rel=0.3)


def test_one_slow_read_does_not_make_a_slow_tier() -> None:
    estimate = ReadEstimate()
    for _ in range(20):
        estimate.observe(10, 0.010, 0.0)
    estimate.observe(10, 5.0, 0.0)

    cost = estimate.cost

    assert cost is not None
    assert cost.of(10) < 0.025


def test_the_beginning_and_the_end_of_one_read_tell_latency_from_bandwidth() -> None:
    estimate = ReadEstimate()
    estimate.observe(0, 0.100, 0.0)
    estimate.observe(4, 0.104, 0.0)

    cost = estimate.cost

    assert cost is not None
    assert cost.of(100) == pytest.approx(0.2, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 100.0)), min_size=1, max_size=50))
def test_an_estimate_is_never_negative_whatever_was_observed(
    reads: list[tuple[int, float]],
) -> None:
    estimate = ReadEstimate()
    for size, read_s in reads:
        estimate.observe(size, read_s, 0.0)

        cost = estimate.cost

        assert cost is not None
        assert cost.latency_s >= 0
        assert cost.block_s >= 0
        assert math.isfinite(cost.of(500))


def test_what_others_measured_serves_until_something_was_read() -> None:
    estimate = ReadEstimate()
    estimate.hint(ReadCost(0.1, 0.1))
    hinted = estimate.cost
    estimate.observe(10, 0.010, 0.0)

    assert hinted == ReadCost(0.1, 0.1)
    assert estimate.cost is not None
    assert estimate.cost.of(10) < 0.5


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

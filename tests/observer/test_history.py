"""How the time to the first token went on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ledger import Segment
from services.observer.history import GROWTH, RESIDUAL, SHARES, History, Series, Step
from services.observer.model import Request
from tests.observer.made import a_request

NOW = 1_800_000_000.0


def late(ttft_s: float, *, ago_s: float = 1.0, residual_s: float = 0.0, **more: object) -> Request:
    spent_s = {Segment.PREFILL: ttft_s - residual_s}
    return a_request(
        arrived_unix_s=NOW - ago_s, ttft_s=ttft_s, spent_s=spent_s, residual_s=residual_s, **more
    )


@given(st.lists(st.floats(1e-5, 500), min_size=1, max_size=200))
def test_a_quantile_is_within_a_bin_of_the_exact_one(ttfts_s: list[float]) -> None:
    step = Step()
    for ttft_s in ttfts_s:
        step.add(late(ttft_s))
    ordered = sorted(ttfts_s)
    summary = step.summary()
    for share, found in ((0.5, summary.p50_s), (0.95, summary.p95_s)):
        rank = -(-len(ordered) * round(share * 100) // 100)
        exact = ordered[rank - 1]
        assert found is not None
        assert exact / GROWTH**2 - 1e-4 <= found <= exact * GROWTH**2 + 1e-4


@given(st.lists(st.floats(1e-5, 500), min_size=1, max_size=60), st.floats(0, 1))
def test_shares_add_up_to_the_mean(ttfts_s: list[float], residual_share: float) -> None:
    step = Step()
    for ttft_s in ttfts_s:
        step.add(late(ttft_s, residual_s=ttft_s * residual_share))
    mean_s = step.summary().mean_s
    assert mean_s is not None
    assert [*mean_s] == [*SHARES]
    assert sum(mean_s.values()) == pytest.approx(sum(ttfts_s) / len(ttfts_s))
    assert mean_s[RESIDUAL] == pytest.approx(sum(mean_s.values()) * residual_share)


def test_what_the_slowest_wait_for_is_told_apart() -> None:
    step = Step()
    for _ in range(99):
        step.add(late(0.1))
    step.add(a_request(ttft_s=2.0, spent_s={Segment.QUEUE: 2.0}, residual_s=0.0))
    for _ in range(4):
        step.add(a_request(ttft_s=1.0, spent_s={Segment.KV_LOAD: 1.0}, residual_s=0.0))
    summary = step.summary()
    assert summary.mean_s is not None
    assert summary.slowest_s is not None
    assert summary.mean_s[Segment.PREFILL] > summary.mean_s[Segment.QUEUE]
    assert summary.slowest_s[Segment.KV_LOAD] > 10 * summary.mean_s[Segment.KV_LOAD]


def test_one_request_is_its_own_quantile() -> None:
    step = Step()
    step.add(late(0.123))
    summary = step.summary()
    assert summary.p50_s == summary.p95_s == pytest.approx(0.123)


def test_requests_without_a_first_token_are_counted_alone() -> None:
    step = Step()
    step.add(a_request(ttft_s=None, error="no worker"))
    summary = step.summary()
    assert (summary.num_requests, summary.num_failed) == (1, 1)
    assert summary.p50_s is None
    assert summary.mean_s is None
    assert summary.hit_rate is None


@given(
    st.lists(st.tuples(st.floats(0.001, 100), st.floats(-1e6, 1e6), st.floats(0, 400)), max_size=80)
)
def test_it_stays_bounded_whatever_clocks_say(requests: list[tuple[float, float, float]]) -> None:
    history, now = History(), NOW
    for ttft_s, ago_s, passed_s in requests:
        now += passed_s
        history.add(late(ttft_s, ago_s=ago_s), now)
        history.check_integrity()


def test_a_clock_that_runs_ahead_counts_as_now() -> None:
    series = Series(step_s=5, num_steps=3)
    series.add(late(0.1, ago_s=-1000), NOW)
    assert series.summary_at(series.begins_unix_s(NOW)[-1]).num_requests == 1


def test_what_is_too_old_is_left_out() -> None:
    series = Series(step_s=5, num_steps=3)
    series.add(late(0.1, ago_s=16), NOW)
    assert series.oldest_unix_s(NOW) is None
    series.add(late(0.1, ago_s=1), NOW)
    assert series.oldest_unix_s(NOW) == NOW - 5
    assert series.oldest_unix_s(NOW + 60) is None

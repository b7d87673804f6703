from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.observer import window
from services.observer.model import BubbleSum, Hop, Reading
from services.observer.window import RecentBubbles, RecentReadings, RecentRequests
from tests.observer.made import a_hop


def hop(trace: int, number: int, name: str, parent: int | None = None, **changes: Any) -> Hop:
    return a_hop(
        trace_id=f"{trace:032x}",
        span_id=f"{number:016x}",
        parent_span_id="" if parent is None else f"{parent:016x}",
        name=name,
        **changes,
    )


def join(recent: RecentRequests, *hops: Hop, now_s: float = 0.0) -> tuple[int, int]:
    """How many requests are new, and how many more complete."""
    joined = recent.join(hops[0].trace_id, hops, now_s)
    recent.check_integrity()
    return len(joined.new), len(joined.completed)


def test_late_hops_complete_a_request_that_is_known() -> None:
    recent = RecentRequests(window_s=60, max_requests=10)
    assert join(recent, hop(1, 10, "router.generate")) == (1, 0)
    assert join(recent, hop(1, 11, "worker.generate", 10)) == (0, 1)

    [request] = recent
    assert [each.name for each in request.hops] == ["router.generate", "worker.generate"]


def test_an_outermost_hop_that_comes_late_takes_the_place_of_what_is_below_it() -> None:
    recent = RecentRequests(window_s=60, max_requests=10)
    join(recent, hop(1, 11, "worker.generate", 10))
    assert join(recent, hop(1, 10, "router.generate", 9)) == (0, 1)
    assert join(recent, hop(1, 9, "gateway.request")) == (0, 1)

    [request] = recent
    assert [each.name for each in request.hops] == [
        "gateway.request",
        "router.generate",
        "worker.generate",
    ]


def test_another_request_of_a_known_trace_is_a_new_one() -> None:
    recent = RecentRequests(window_s=60, max_requests=10)
    join(recent, hop(1, 10, "router.generate"))

    assert join(recent, hop(1, 20, "router.generate")) == (1, 0)
    assert len(recent.of_trace(f"{1:032x}")) == 2


def test_spans_of_two_traces_may_have_one_id() -> None:
    recent = RecentRequests(window_s=60, max_requests=10)
    assert join(recent, hop(1, 10, "router.generate")) == (1, 0)
    assert join(recent, hop(2, 10, "router.generate")) == (1, 0)

    assert [len(recent.of_trace(f"{trace:032x}")) for trace in (1, 2)] == [1, 1]
    recent.expire(61.0)
    recent.check_integrity()
    assert not len(recent)


def test_a_hop_that_is_told_twice_changes_nothing() -> None:
    recent = RecentRequests(window_s=60, max_requests=10)
    join(recent, hop(1, 10, "router.generate"))

    assert join(recent, hop(1, 10, "router.generate")) == (0, 1)
    assert len(recent) == 1


@given(
    heard=st.lists(
        st.tuples(
            st.integers(1, 4), st.integers(1, 6), st.none() | st.integers(1, 6), st.floats(0, 40)
        ),
        max_size=30,
    )
)
def test_it_is_bounded_by_count_and_by_time(
    heard: list[tuple[int, int, int | None, float]],
) -> None:
    recent, now_s = RecentRequests(window_s=60, max_requests=5), 0.0
    for trace, number, parent, pause_s in heard:
        now_s += pause_s
        # Span ids of one trace are no other trace's.
        place = 100 * trace
        above = None if parent is None else place + parent
        join(recent, hop(trace, place + number, "router.generate", above), now_s=now_s)
    recent.expire(now_s + 61)
    recent.check_integrity()

    assert len(recent) == 0


def reading(unix_s: float, value: float = 0.0, name: str = "a") -> Reading:
    return Reading(unix_s, "m", "worker", name, (), value)


def test_readings_are_kept_now_and_then_and_the_newest_always() -> None:
    readings = RecentReadings(window_s=60)
    for second in range(36):
        readings.add(reading(second, second))

    kept = [each.value for each in readings]
    assert kept[-1] == 35
    assert len(kept) <= 6
    assert all(later - earlier >= 9 for earlier, later in itertools.pairwise(kept[:-1]))


def test_readings_leave_with_time_and_new_series_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "MAX_SERIES", 2)
    readings = RecentReadings(window_s=60)
    for number in range(4):
        readings.add(reading(number, name=str(number)))
    assert readings.num_refused == 2
    readings.expire(100.0)

    assert list(readings) == []


def test_bubbles_leave_with_time() -> None:
    bubbles = RecentBubbles(window_s=60)
    for second in (0, 50, 100):
        bubbles.add(BubbleSum(second, "w", "queue", 1.0))
    bubbles.expire(100.0)

    assert [each.unix_s for each in bubbles] == [50, 100]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ledger import Interval, Segment
from worker.phases import MAX_INTERVALS, Phases

QUEUE, LOAD, PREFILL = Segment.PREFILL_QUEUE, Segment.KV_LOAD, Segment.PREFILL


def test_a_request_waits_until_something_else_is_said() -> None:
    phases = Phases(10.0)
    phases.enter(LOAD, 10.5)
    phases.enter(PREFILL, 11.0)
    phases.enter(QUEUE, 12.0)
    phases.enter(PREFILL, 14.0)
    phases.end(15.0)

    assert phases.spent_s == {QUEUE: 2.5, LOAD: 0.5, PREFILL: 2.0}
    assert phases.intervals[0] == Interval(QUEUE, 10.0, 10.5)


def test_to_enter_the_phase_that_it_is_in_changes_nothing() -> None:
    phases = Phases(0.0)
    phases.enter(QUEUE, 1.0)
    phases.end(2.0)

    assert phases.intervals == [Interval(QUEUE, 0.0, 2.0)]


def test_what_comes_after_the_first_token_does_not_count() -> None:
    phases = Phases(0.0)
    phases.end(1.0)
    phases.enter(LOAD, 2.0)
    phases.end(3.0)

    assert phases.spent_s == {QUEUE: 1.0}
    assert phases.ended_s == 1.0


def test_what_goes_on_is_told_up_to_now() -> None:
    phases = Phases(0.0)
    phases.enter(LOAD, 1.0)

    assert phases.until(4.0) == [Interval(QUEUE, 0.0, 1.0), Interval(LOAD, 1.0, 4.0)]
    assert phases.ended_s is None


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Segment)), st.floats(0.001, 10)),
        max_size=3 * MAX_INTERVALS,
    ),
    st.floats(0, 10),
)
def test_every_moment_is_in_one_phase(steps: list[tuple[Segment, float]], last_s: float) -> None:
    phases, now_s = Phases(5.0), 5.0
    for segment, after_s in steps:
        now_s += after_s
        phases.enter(segment, now_s)
    phases.end(now_s + last_s)

    assert sum(phases.spent_s.values()) == pytest.approx(now_s + last_s - 5.0)
    assert len(phases.intervals) <= MAX_INTERVALS
    for one, other in zip(phases.intervals, phases.intervals[1:], strict=False):
        assert one.end_s == other.start_s
        assert one.segment is not other.segment

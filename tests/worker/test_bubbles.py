from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ledger import Interval, Segment
from services.core.sampling import Sampling
from worker.bubbles import CORE, Gap, ShortGaps, charge, judge, lay_out
from worker.messages import Bubble, Submit
from worker.sequence import Sequence

GAP = Gap(10.0, 12.0)


def request(submitted_s: float, *before: tuple[Segment, float]) -> Sequence:
    ids = np.arange(4, dtype=np.uint32)
    return Sequence.of(Submit(1, ids, (), Sampling(), False, submitted_s, before=before))


def test_short_gaps_are_told_together() -> None:
    gaps = ShortGaps()
    told = [gaps.add(Gap(at_s, at_s + 0.0002)) for at_s in range(6)]

    assert [len(each) for each in told] == [0, 0, 1, 0, 0, 1]
    assert [each.stage for [each] in told[2::3]] == [CORE, CORE]
    assert sum(each.duration_s for [each] in told[2::3]) == pytest.approx(6 * 0.0002)


def test_what_a_request_went_through_before_ends_where_it_came() -> None:
    before = [(Segment.PREPROCESS, 1.0), (Segment.QUEUE, 2.0), (Segment.ROUTE, 0.5)]

    assert lay_out(before, 10.0) == [
        Interval(Segment.PREPROCESS, 6.5, 7.5),
        Interval(Segment.QUEUE, 7.5, 9.5),
        Interval(Segment.ROUTE, 9.5, 10.0),
    ]


def test_a_gap_is_charged_to_the_stages_that_held_the_request_meanwhile() -> None:
    held = [
        *lay_out([(Segment.PREPROCESS, 0.5), (Segment.QUEUE, 0.75)], 11.0),
        Interval(Segment.KV_LOAD, 11.0, 11.5),
        Interval(Segment.PREFILL_QUEUE, 11.5, 12.0),
    ]

    assert charge(GAP, [held], answering_from_s=math.inf) == {
        "preprocess": 0.25,
        "queue": 0.75,
        "kv_load": 0.5,
        "prefill_queue": 0.5,
    }


def test_time_in_which_nobody_asked_for_anything_is_no_bubble() -> None:
    assert charge(GAP, [lay_out([(Segment.QUEUE, 0.25)], 12.0)], answering_from_s=math.inf) == {
        "queue": 0.25
    }
    assert charge(GAP, [], answering_from_s=math.inf) == {}


def test_the_request_counts_that_was_on_its_way_for_most_of_the_gap() -> None:
    late = [Interval(Segment.QUEUE, 11.75, 12.0)]
    early = [Interval(Segment.KV_LOAD, 9.0, 11.0), Interval(Segment.PREFILL_QUEUE, 11.0, 12.0)]

    assert charge(GAP, [late, early], answering_from_s=math.inf) == {
        "kv_load": 1.0,
        "prefill_queue": 1.0,
    }


def test_what_kept_answers_from_their_next_step_is_the_loop() -> None:
    coming = [Interval(Segment.KV_LOAD, 11.5, 12.0)]

    assert charge(GAP, [], answering_from_s=GAP.began_s) == {CORE: 2.0}
    assert charge(GAP, [coming], answering_from_s=GAP.began_s) == {"kv_load": 0.5, CORE: 1.5}


def test_the_sampling_of_a_first_token_is_the_loop_s_work() -> None:
    sampled = [Interval(Segment.PREFILL, 9.0, 10.5)]

    assert charge(GAP, [sampled], answering_from_s=math.inf) == {CORE: 0.5}


def test_a_request_whose_first_token_another_worker_gave_waited_before_it_answered() -> None:
    handed_off = request(11.0, (Segment.QUEUE, 0.25))
    handed_off.phases.enter(Segment.KV_LOAD, 11.25)
    handed_off.phases.end(11.75)

    assert judge(GAP, [handed_off]) == [
        Bubble("queue", 0.25),
        Bubble("prefill_queue", 0.25),
        Bubble("kv_load", 0.5),
        Bubble(CORE, 0.25),
    ]


def test_who_answers_since_before_the_gap_waited_for_the_loop_all_the_while() -> None:
    answering, ended = request(8.0), request(8.0)
    answering.phases.end(9.0)
    ended.phases.end(9.0)
    ended.finished = True

    assert judge(GAP, [answering, ended]) == [Bubble(CORE, 2.0)]
    assert judge(GAP, [ended]) == []


INTERVALS = st.lists(st.tuples(st.sampled_from(list(Segment)), st.floats(0.001, 5)), max_size=8)


@given(st.lists(st.tuples(INTERVALS, st.floats(5, 15)), max_size=5), st.booleans())
def test_no_more_is_charged_than_the_gap_was_long(
    requests: list[tuple[list[tuple[Segment, float]], float]], answering: bool
) -> None:
    waits = [lay_out(before, arrived_s) for before, arrived_s in requests]
    charged = charge(GAP, waits, answering_from_s=GAP.began_s if answering else math.inf)

    assert all(duration_s > 0 for duration_s in charged.values())
    assert sum(charged.values()) <= GAP.duration_s + 1e-9
    if answering:
        assert sum(charged.values()) == pytest.approx(GAP.duration_s)

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.reports import LoadEvent
from router.work import RecentWork, WorkerLoad


def measured(**load: Any) -> LoadEvent:
    return LoadEvent(prefill_tokens_per_s=1000.0)._replace(**load)


def test_what_is_sent_is_worked_off_in_time() -> None:
    load = WorkerLoad()
    load.begin(0.3, 300, now_s=10.0)
    load.begin(0.2, 200, now_s=10.0)

    assert load.queue_s(10.0) == pytest.approx(0.5)
    assert load.queue_s(10.4) == pytest.approx(0.1)
    assert load.queue_s(12.0) == 0.0


def test_a_prompt_that_is_computed_early_is_waited_for_no_longer() -> None:
    load = WorkerLoad()
    load.begin(0.3, 300, now_s=0.0)
    load.begin(0.2, 200, now_s=0.0)
    load.end(0.3, 300, now_s=0.05)

    assert load.queue_s(0.05) == pytest.approx(0.2)
    load.end(0.2, 200, now_s=0.1)
    assert load.queue_s(0.1) == 0.0
    assert load.is_idle
    assert not load.is_busy


def test_work_of_other_routers_shows_in_reports_and_is_worked_off() -> None:
    load = WorkerLoad()
    load.begin(0.1, 100, now_s=0.0)
    load.hear(measured(queued_prompt_tokens=600, num_running=5), in_flight=1, now_s=0.0)

    assert load.queue_s(0.0) == pytest.approx(0.1 + 0.5)
    assert load.foreign_running == 4
    assert load.queue_s(0.3) == pytest.approx(0.2)
    assert load.queue_s(9.0) == 0.0


def test_own_work_that_a_report_does_not_know_of_yet_is_no_credit() -> None:
    load = WorkerLoad()
    load.begin(0.5, 500, now_s=0.0)
    load.hear(measured(queued_prompt_tokens=0), in_flight=1, now_s=0.0)

    assert load.queue_s(0.0) == pytest.approx(0.5)
    assert load.foreign_running == 0


def test_without_reports_nothing_is_known_of_others() -> None:
    load = WorkerLoad()
    load.hear(measured(queued_prompt_tokens=600, num_blocks_total=10), in_flight=0, now_s=0.0)
    load.go_deaf()

    assert load.queue_s(0.0) == 0.0
    assert load.room_wait_s(100) == 0.0


def test_a_request_that_needs_room_waits_for_those_that_leave() -> None:
    load = WorkerLoad()
    load.learn_residence(2.0)
    load.hear(measured(num_blocks_reserved=40, num_blocks_total=50), in_flight=0, now_s=0.0)

    assert load.room_wait_s(10) == 0.0
    assert load.room_wait_s(30) == pytest.approx(1.0)
    assert load.room_wait_s(1000) == pytest.approx(2.0)


def test_speed_is_what_the_worker_says_and_else_what_prompts_took() -> None:
    load = WorkerLoad()
    load.learn_token(10, 5.0)  # too short to tell
    assert load.token_s == 0.0
    load.learn_token(100, 0.1)
    assert load.token_s == pytest.approx(0.001)
    load.hear(LoadEvent(prefill_tokens_per_s=500.0), in_flight=0, now_s=0.0)
    load.learn_token(100, 9.0)
    assert load.token_s == pytest.approx(0.002)


def test_who_lies_is_trusted_less_and_can_win_it_back() -> None:
    load = WorkerLoad()
    for _ in range(20):
        load.learn_trust(1000, 0)
    assert load.trust < 0.01
    for _ in range(300):
        load.hear(measured(), in_flight=0, now_s=0.0)
    assert load.trust > 0.9


@given(st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(0, 5000)), max_size=20), st.data())
def test_every_count_returns_to_zero(works: list[tuple[float, int]], data: st.DataObject) -> None:
    load = WorkerLoad()
    now_s = 0.0
    for work_s, num_tokens in works:
        load.begin(work_s, num_tokens, now_s)
        now_s += 0.01
    total_s = sum(work_s for work_s, _ in works)
    assert load.queue_s(now_s) <= total_s + 1e-9
    for work_s, num_tokens in data.draw(st.permutations(works)):
        load.end(work_s, num_tokens, now_s)
        assert load.queue_s(now_s) >= 0.0
    assert load.is_idle
    assert load.queue_s(now_s) == 0.0


def test_recent_work_counts_half_after_its_half_life() -> None:
    recent = RecentWork(60.0)

    assert recent.scale(100.0) == 1.0
    assert recent.scale(160.0) == pytest.approx(2.0)
    assert recent.rebase(160.0) == pytest.approx(0.5)
    assert recent.scale(160.0) == 1.0


def test_a_prompt_that_should_have_begun_long_ago_may_take_as_long_again() -> None:
    load = WorkerLoad()
    load.begin(0.1, 100, now_s=0.0)

    assert load.wait_s(0.1, 0.0, now_s=0.1) == 0.0
    assert load.wait_s(0.1, 0.0, now_s=5.1) == pytest.approx(5.0)
    load.end(0.1, 100, now_s=6.0)
    assert load.wait_s(0.1, 0.0, now_s=6.0) == 0.0


@pytest.mark.parametrize("speed", [5e-324, 1e-9, 1e300, math.inf])
def test_no_speed_makes_a_cost_that_is_no_number(speed: float) -> None:
    load = WorkerLoad()
    load.hear(LoadEvent(prefill_tokens_per_s=speed), in_flight=0, now_s=0.0)

    assert 0 < load.token_s * 1_000_000 < 1e12


@pytest.mark.parametrize("speed", [math.nan, -1.0, -math.inf])
def test_a_speed_that_is_none_is_not_believed(speed: float) -> None:
    load = WorkerLoad()
    load.hear(LoadEvent(prefill_tokens_per_s=speed), in_flight=0, now_s=0.0)

    assert load.token_s == 0.0


def test_a_month_of_silence_is_outlived() -> None:
    recent = RecentWork(3600.0)
    recent.scale(0.0)

    assert recent.scale(1e9) > RecentWork.LARGEST
    assert recent.rebase(1e9) > 0.0
    assert recent.scale(1e9) == 1.0


@pytest.mark.parametrize("times_slower", [5, 20, 100, 1e6])
def test_who_was_slow_once_is_believed_to_be_fast_again_in_two_seconds(times_slower: float) -> None:
    load = WorkerLoad()
    load.hear(LoadEvent(prefill_tokens_per_s=1000 / times_slower), in_flight=0, now_s=0.0)
    for tenth in range(20):
        load.doubt_speed(0.001, tenth / 10)

    assert 0.001 < load.token_s < 0.002


def test_a_speed_that_is_said_again_with_each_token_of_an_answer_fades_too() -> None:
    load = WorkerLoad()
    for tenth in range(20):
        cold = LoadEvent(num_running=1, prefill_tokens_per_s=10.0, prompt_tokens_evaluated=32)
        load.hear(cold, in_flight=1, now_s=tenth / 10)
        load.doubt_speed(0.001, tenth / 10)
    assert 0.001 < load.token_s < 0.002

    load.hear(cold._replace(prompt_tokens_evaluated=64), in_flight=1, now_s=2.0)
    assert load.token_s == pytest.approx(0.1)

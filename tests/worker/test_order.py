from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.steps import INFO, Steps, prompt
from worker.order import BATCH_AGEING_S, PATIENCE, Urgency, in_order

FAST = 20_000.0


def urgency(*, came_s: float = 0.0, alone_s: float = 0.0, batch: bool = False) -> Urgency:
    return Urgency(batch, came_s, came_s + PATIENCE * alone_s)


def test_short_prompts_go_past_long_ones() -> None:
    waiting = {
        "long": urgency(alone_s=0.2),
        "later": urgency(came_s=0.1, alone_s=0.2),
        "short": urgency(came_s=0.5, alone_s=0.01),
    }

    assert in_order(waiting) == ["short", "long", "later"]


def test_a_long_prompt_is_passed_no_more_once_it_has_waited() -> None:
    came_s = PATIENCE * 0.2
    waiting = {"short": urgency(came_s=came_s, alone_s=0.01), "long": urgency(alone_s=0.2)}

    assert in_order(waiting) == ["long", "short"]


def test_batch_goes_behind_interactive_until_it_has_aged() -> None:
    batch = urgency(batch=True)
    young = urgency(came_s=BATCH_AGEING_S - 1, alone_s=9)
    late = urgency(came_s=BATCH_AGEING_S + 1)

    assert in_order({"batch": batch, "young": young}) == ["young", "batch"]
    assert in_order({"late": late, "batch": batch}) == ["batch", "late"]


def test_equally_urgent_ones_stay_as_they_are() -> None:
    assert in_order({name: urgency() for name in "bac"}) == ["b", "a", "c"]


def test_without_a_measured_rate_who_comes_first_goes_first() -> None:
    steps = Steps()
    steps.add(1, prompt(1, 80))
    sequence = steps.scheduler.find(1)
    assert sequence is not None

    assert Urgency.of(sequence.submit, 80, 0.0).deadline_s == 0.0


def test_a_short_prompt_does_not_wait_for_long_ones_that_run() -> None:
    steps = Steps(INFO._replace(num_blocks=4096), tokens_per_s=FAST, step_tokens=512)
    for request_id in (1, 2, 3):
        steps.add(request_id, prompt(request_id, 4000))
    steps.step()
    steps.add(4, prompt(9, 128))

    assert steps.step()[0] == 4
    assert 4 in steps.first_s


def test_a_short_prompt_does_not_wait_for_long_ones_that_have_no_slot() -> None:
    steps = Steps(INFO._replace(num_slots=1, num_blocks=4096), tokens_per_s=FAST, step_tokens=512)
    for request_id in (1, 2, 3):
        steps.add(request_id, prompt(request_id, 4000))
    steps.step()
    steps.add(4, prompt(9, 128))
    steps.run()

    assert sorted(steps.first_s, key=steps.first_s.__getitem__) == [1, 4, 2, 3]


@settings(max_examples=40)
@given(
    long=st.integers(200, 2000),
    short=st.integers(8, 100),
    load=st.floats(0.5, 2.0),
    num_slots=st.integers(1, 4),
)
def test_a_long_prompt_ends_in_a_multiple_of_its_own_time_whatever_comes(
    long: int, short: int, load: float, num_slots: int
) -> None:
    """A stream of short ones, and all that may pass: what comes in PATIENCE times its own."""
    steps = Steps(INFO._replace(num_slots=num_slots, num_blocks=1024), step_tokens=64)
    every_s, alone_s = short / 1000 / load, long / 1000
    steps.add(0, prompt(1, long))
    num_short = 0
    while 0 not in steps.first_s:
        while (at_s := num_short * every_s) <= steps.now_s:
            num_short += 1
            steps.add(num_short, prompt(1 + num_short, short), submitted_s=at_s)
        if not steps.step():
            steps.now_s = num_short * every_s

    passing_s = PATIENCE * alone_s * max(1.0, load)
    assert steps.first_s[0] <= passing_s + alone_s + (num_slots + 1) * short / 1000 + 0.2


@pytest.mark.parametrize("num_slots", [1, 4])
def test_of_a_stream_at_its_limit_every_prompt_ends(num_slots: int) -> None:
    steps = Steps(INFO._replace(num_slots=num_slots, num_blocks=1024), step_tokens=64)
    for request_id in range(60):
        steps.add(request_id, prompt(request_id, 20 + 300 * (request_id % 7 == 0)))
        steps.step()
    steps.run()

    assert len(steps.ended_s) == 60

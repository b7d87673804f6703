"""Whether drafts pay, and what a worker does about it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.core.sampling import Sampling
from tests.worker.steps import INFO
from worker.messages import Submit
from worker.sequence import Sequence
from worker.speculation import (
    REFRESH_STEPS,
    REST_TOKENS,
    TRIAL_TOKENS,
    DraftClass,
    Speculation,
    StepCosts,
    draft_class,
)

PLAIN_S, TOKEN_S = 0.010, 0.003
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]


def sequence(*, max_tokens: int = 100, temperature: float = 0.0, batch: bool = False) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=1)
    ids = np.array(PROMPT, np.uint32)
    made = Sequence.of(Submit(1, ids, (), sampling, batch_class=batch, submitted_s=0.0))
    made.answer.append(4)
    return made


def speculation(*, max_draft: int = 4) -> Speculation:
    """One that knows what a step without drafts takes."""
    made = Speculation(INFO, max_draft=max_draft, max_batch_tokens=64)
    made.observe(1, 0, PLAIN_S)
    return made


def run(made: Speculation, asking: Sequence, *, hit_rate: float, num_steps: int) -> int:
    """Steps with drafts."""
    chance, num_drafts = random.Random(1), 0
    for _ in range(num_steps):
        made.propose([asking])
        num_drafted, num_accepted = len(asking.draft), 0
        made.observe(1, num_drafted, PLAIN_S + num_drafted * TOKEN_S)
        while num_accepted < num_drafted and chance.random() < hit_rate:
            num_accepted += 1
        num_drafts += num_drafted > 0
        made.learn(asking, num_accepted, 1)
    return num_drafts


def test_a_drafted_token_costs_what_its_time_would_bring() -> None:
    costs = StepCosts()
    assert not costs.is_known(4)
    costs.observe(4, 0, PLAIN_S)
    costs.observe(4, 8, PLAIN_S + 8 * TOKEN_S)
    assert costs.is_known(4)
    assert costs.price(4) == pytest.approx(4 * TOKEN_S / PLAIN_S)


def test_a_step_without_drafts_is_measured_again_now_and_then() -> None:
    costs = StepCosts()
    costs.observe(1, 0, PLAIN_S)
    for _ in range(REFRESH_STEPS):
        assert costs.is_known(1)
        costs.observe(1, 2, 2 * PLAIN_S)
    assert not costs.is_known(1)
    costs.observe(1, 0, PLAIN_S)
    assert costs.is_known(1)


def test_drafts_that_come_true_go_on() -> None:
    made, asking = speculation(), sequence()
    assert run(made, asking, hit_rate=0.9, num_steps=1000) > 950
    [(name, counts)] = made.counts.items()
    assert name == "interactive, greedy"
    assert counts.is_on
    assert counts.won_tokens > 0
    assert counts.spent_s == pytest.approx(counts.num_drafted * TOKEN_S, rel=0.01)


def test_drafts_that_do_not_pay_are_left_and_tried_again_for_ever() -> None:
    """Ever later, but not beyond a bound."""
    made, asking = speculation(), sequence()
    num_before = run(made, asking, hit_rate=0.0, num_steps=30_000)
    assert num_before * 2 < 30_000 / 20
    num_rests = made.counts["interactive, greedy"].num_rests
    assert num_rests > 6
    run(made, asking, hit_rate=0.0, num_steps=REST_TOKENS[1] + TRIAL_TOKENS + 1)
    assert made.counts["interactive, greedy"].num_rests > num_rests


def test_what_pays_again_is_found_again() -> None:
    made, asking = speculation(), sequence()
    run(made, asking, hit_rate=0.0, num_steps=5000)
    assert run(made, asking, hit_rate=1.0, num_steps=REST_TOKENS[1] + 2000) > 1500


def test_a_trial_that_went_well_makes_the_next_rest_short() -> None:
    made = DraftClass()
    for _ in range(3):
        made.rest(REST_TOKENS[1])
        made.learn(TRIAL_TOKENS, 0, 0.5, 0.0)
    assert not made.is_on
    made.rest(REST_TOKENS[1])
    for _ in range(4):
        made.learn(TRIAL_TOKENS, TRIAL_TOKENS, 0.5, 0.0)
    for _ in range(8):
        made.learn(TRIAL_TOKENS, 0, 0.5, 0.0)
        if not made.is_on:
            break
    assert not made.is_on
    made.rest(REST_TOKENS[0] - 1)
    assert not made.is_on
    made.rest(1)
    assert made.is_on


def test_classes_are_judged_by_themselves() -> None:
    made = speculation()
    greedy, sampled, batch = sequence(), sequence(temperature=1.0), sequence(batch=True)
    run(made, sampled, hit_rate=0.0, num_steps=40)
    assert not made.counts["interactive, sampled"].is_on
    made.propose([sampled])
    assert sampled.draft == []
    for each in (greedy, batch):
        made.propose([each])
        assert each.draft == [5, 6]
    assert draft_class(batch) == "batch, greedy"


def test_nothing_is_drafted_before_a_step_without_has_been_seen() -> None:
    made, asking = Speculation(INFO, max_draft=4, max_batch_tokens=64), sequence()
    made.propose([asking])
    assert asking.draft == []


def test_a_draft_does_not_go_beyond_the_answers_end() -> None:
    made, asking = speculation(), sequence(max_tokens=3)
    made.propose([asking])
    assert asking.draft == [5]  # and one that is sampled behind it
    asking.answer.append(5)
    made.propose([asking])
    assert asking.draft == []


def test_a_step_has_its_most_tokens() -> None:
    made = Speculation(INFO, max_draft=8, max_batch_tokens=16)
    made.observe(8, 0, PLAIN_S)
    asking = [sequence() for _ in range(8)]
    made.propose(asking)
    assert [len(each.draft) for each in asking] == [1] * 8


def test_it_may_be_off() -> None:
    made, asking = speculation(max_draft=0), sequence()
    assert run(made, asking, hit_rate=1.0, num_steps=10) == 0
    assert made.counts == {}

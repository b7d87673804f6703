"""Steps in progress, with the simulated engine behind them."""

from __future__ import annotations

import time
from typing import cast

import numpy as np
import pytest

from services.core.sampling import Sampling
from tests.worker.test_simulated import new_engine
from worker.engines.contract import Engine, EngineFailure, Work
from worker.messages import Submit
from worker.scheduler import Planned
from worker.sequence import Sequence
from worker.steps import BESIDE, TOGETHER, Ended, Steps

DECODES, PROMPTS = BESIDE


def planned(slot: int, num_tokens: int, *, answered: bool = False) -> Planned:
    tokens = np.arange(num_tokens, dtype=np.uint32)
    sequence = Sequence.of(Submit(slot, tokens, (), Sampling(max_tokens=9), False, 0.0))
    if answered:
        sequence.num_computed = num_tokens
        return Planned(sequence, Work(slot, num_tokens, tokens[:1], True))
    return Planned(sequence, Work(slot, 0, tokens, True))


class Blocking:
    """An engine that computes when it is asked for what it has computed."""

    stepper = None

    def __init__(self, engine: Engine) -> None:
        self.evaluate = engine.evaluate


def test_of_an_engine_that_blocks_a_step_is_over_when_it_has_been_evaluated() -> None:
    steps = Steps(cast(Engine, Blocking(new_engine(prefill_tokens_per_s=1000))))
    assert steps.free() == list(TOGETHER)
    steps.begin(TOGETHER[0], [planned(0, 5), planned(1, 7)])

    (ended,) = steps.ended()

    assert 0.012 <= ended.ended_s - ended.began_s == ended.busy_s
    assert (ended.num_prompt, ended.num_decoding, len(ended.logits)) == (12, 0, 2)
    assert steps.ended() == []
    assert steps.wait_s() is None


def test_a_step_that_goes_on_by_itself_is_waited_for_by_nobody() -> None:
    engine = new_engine(decode_step_ms=60_000)
    steps = Steps(engine)
    decode = planned(0, 5, answered=True)
    engine.evaluate([Work(0, 0, decode.sequence.submit.token_ids, False)])
    assert steps.free() == list(TOGETHER)
    steps.begin(TOGETHER[0], [decode])

    assert steps.free() == []
    assert steps.ended() == []
    assert steps.holds(decode.sequence)
    assert 0 < (steps.wait_s() or 0) <= 60


def test_an_engine_that_ends_a_step_unseen_is_idle_from_then_on() -> None:
    steps = Steps(new_engine(prefill_tokens_per_s=1000))
    steps.begin(TOGETHER[0], [planned(0, 5)])
    time.sleep(0.03)

    (ended,) = steps.ended()
    gap = steps.begin(TOGETHER[0], [planned(1, 5)])

    assert ended.busy_s == ended.ended_s - ended.began_s
    assert gap is not None
    assert gap.began_s == ended.ended_s
    assert gap.duration_s > 0.01


def test_with_overlap_a_prompt_begins_and_ends_while_a_decode_goes_on() -> None:
    engine = new_engine(decode_overlap=True, decode_step_ms=60_000)
    steps = Steps(engine)
    prompt, decode = planned(0, 5), planned(1, 5, answered=True)
    engine.evaluate([Work(1, 0, decode.sequence.submit.token_ids, False)])
    steps.begin(DECODES, [decode])

    assert steps.free() == [PROMPTS]
    assert steps.ended() == []
    assert steps.holds(decode.sequence)
    assert 0 < (steps.wait_s() or 0) <= 60

    steps.begin(PROMPTS, [prompt])
    assert steps.free() == []
    while not (ended := steps.ended()):
        time.sleep(steps.wait_s() or 0)
    assert [each.planned for each in ended] == [[prompt]]
    assert steps.free() == [PROMPTS]
    assert not steps.holds(prompt.sequence)


def test_time_in_which_steps_overlap_counts_once() -> None:
    engine = new_engine(decode_overlap=True, decode_step_ms=30, prefill_tokens_per_s=1000)
    steps = Steps(engine)
    decode = planned(1, 5, answered=True)
    engine.evaluate([Work(1, 0, decode.sequence.submit.token_ids, False)])
    began_s = time.monotonic()
    steps.begin(DECODES, [decode])
    steps.begin(PROMPTS, [planned(0, 20)])
    ended: list[Ended] = []
    while len(ended) < 2:
        time.sleep(steps.wait_s() or 0)
        ended += steps.ended()

    assert 0.03 <= sum(each.busy_s for each in ended) <= time.monotonic() - began_s


def test_what_is_asked_for_early_is_waited_for() -> None:
    engine = new_engine(decode_overlap=True, prefill_tokens_per_s=1000)
    batch = [planned(0, 20).work]
    end_s = engine.begin(batch)
    logits = engine.evaluate(batch)

    assert time.monotonic() >= end_s
    assert logits.tobytes() == new_engine().evaluate(batch).tobytes()


def test_a_step_that_cannot_be_does_not_begin() -> None:
    engine = new_engine(decode_overlap=True)

    with pytest.raises(EngineFailure, match="position 3 is not next"):
        engine.begin([Work(0, 3, np.zeros(1, np.uint32), True)])

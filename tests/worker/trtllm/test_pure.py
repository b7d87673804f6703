"""Rules of the adapter that need no engine."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.core.ledger import Segment
from services.core.sampling import Sampling
from tests.worker.trtllm.test_core import INFO
from worker.engines.trtllm.admission import Admission, Limits
from worker.engines.trtllm.answers import AnswerReader, EngineLostRequest
from worker.engines.trtllm.health import LEAK_S, Advice, KvUse, Watchdog
from worker.engines.trtllm.segments import first_token_times, transfer_s
from worker.messages import Submit
from worker.phases import Phases


def submit(request_id: int = 1, *, length: int = 10, max_tokens: int = 6, **more: Any) -> Submit:
    sampling = more.pop("sampling", Sampling(max_tokens=max_tokens))
    ids = np.zeros(length, np.uint32)
    return Submit(request_id, ids, (), sampling, False, float(request_id), **more)


def read_all(reader: AnswerReader, *steps: list[int], reason: str | None = None) -> list[Any]:
    found: list[Any] = []
    for number, ids in enumerate(steps, 1):
        last = reason if number == len(steps) else None
        found += reader.read(ids, last, None, None)
    return [(token.token_id, token.finish) for token in found]


def test_ids_that_become_fewer_bring_nothing_twice() -> None:
    reader = AnswerReader(submit(), INFO, num_answered=0)
    ids = [7]
    first = read_all(reader, ids)
    ids += [8, 9]
    more = read_all(reader, ids, ids[:2], ids)

    assert (first, more) == ([(7, "")], [(8, ""), (9, "")])


def test_an_eos_that_is_said_and_then_cut_ends_the_answer_once() -> None:
    reader = AnswerReader(submit(), INFO, num_answered=0)

    assert read_all(reader, [7, 3], [7], reason="stop") == [(7, ""), (3, "stop")]


def test_a_stop_that_is_never_said_ends_the_answer_too() -> None:
    reader = AnswerReader(submit(), INFO, num_answered=0)

    assert read_all(reader, [7], [7], reason="stop") == [(7, ""), (2, "stop")]


def test_the_first_token_of_a_hand_off_is_not_said_again() -> None:
    reader = AnswerReader(submit(max_tokens=2), INFO, num_answered=0, known=[7])

    assert read_all(reader, [7], [7, 8], reason="length") == [(8, "length")]


def test_eos_ids_go_on_where_the_caller_ignores_them() -> None:
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    reader = AnswerReader(submit(sampling=sampling), INFO, num_answered=0)

    assert read_all(reader, [2, 3]) == [(2, ""), (3, "")]


@pytest.mark.parametrize("reason", ["timeout", "cancelled", "length"])
def test_an_end_that_is_not_the_answers_is_told(reason: str) -> None:
    reader = AnswerReader(submit(), INFO, num_answered=0)

    with pytest.raises(EngineLostRequest, match=reason):
        reader.read([7], reason, None, None)


def test_logprobs_come_with_their_tokens() -> None:
    sampling = Sampling(max_tokens=6, logprobs=2)
    reader = AnswerReader(submit(sampling=sampling), INFO, num_answered=0)
    chosen, other = SimpleNamespace(logprob=-1.5), SimpleNamespace(logprob=-0.5)
    (token,) = reader.read([7], None, None, [{7: chosen, 9: other}])

    assert token.logprobs == (-1.5, (9, 7), (-0.5, -1.5))


def admission(**limits: int) -> Admission:
    values = {"num_slots": 2, "num_blocks": 10, "block_tokens": 16, "max_handoffs": 1, **limits}
    return Admission(Limits(**values))


def admitted(found: Admission, *submits: Submit) -> list[int]:
    return [each.request_id for each in found.admit(submits, prefill_tokens_per_s=0.0)]


def test_requests_wait_for_slots_and_for_kv() -> None:
    found = admission()
    assert admitted(found, submit(1), submit(2, length=150), submit(3)) == [1]
    found.release(1)
    assert admitted(found, submit(2, length=150), submit(3)) == [2]
    assert found.num_blocks == 10


def test_hand_offs_wait_for_those_that_nobody_fetched_and_let_others_pass() -> None:
    found = admission()
    offer = {"export_from": 0, "offer": True}
    assert admitted(found, submit(1, **offer), submit(2, **offer), submit(3)) == [1, 3]
    found.leave(1, -1, until_s=100.0, step=5)
    found.release(1)
    found.release(3)
    assert (found.num_running, found.num_orphans) == (0, 1)
    assert admitted(found, submit(2, **offer)) == []
    # Of a step that began before it was left.
    found.drain(1.0, step=6, is_empty=True)
    assert found.num_orphans == 1
    found.drain(1.0, step=7, is_empty=True)
    assert admitted(found, submit(2, **offer)) == [2]


def test_what_nobody_fetched_is_gone_after_the_engines_own_timeout() -> None:
    found = admission()
    admitted(found, submit(1, export_from=0, offer=True))
    found.leave(1, -1, until_s=100.0, step=5)
    found.release(1)
    found.drain(99.0, step=5, is_empty=False)
    assert found.num_orphans == 1
    found.drain(100.0, step=5, is_empty=False)
    assert (found.num_orphans, found.num_blocks) == (0, 0)


def watchdog() -> Watchdog:
    return Watchdog(probe_interval_s=10, stall_timeout_s=30, now_s=0.0)


def test_a_quiet_engine_is_asked_and_a_silent_one_ended() -> None:
    dog = watchdog()

    assert dog.advise(9.0) is Advice.NOTHING
    assert dog.advise(10.0) is Advice.PROBE
    dog.probing(10.0)
    assert dog.advise(39.0) is Advice.NOTHING
    assert dog.advise(40.0) is Advice.RESTART
    dog.hear(40.0)
    assert dog.advise(41.0) is Advice.NOTHING


def test_kv_in_use_while_nothing_runs_has_the_engine_asked() -> None:
    """It cleans up only when new work comes."""
    dog = watchdog()
    dog.use(KvUse(3, 10), num_active=0, now_s=0.0)

    assert dog.advise(LEAK_S - 0.1) is Advice.NOTHING
    assert dog.advise(LEAK_S) is Advice.PROBE
    dog.use(KvUse(3, 10), num_active=1, now_s=6.0)
    assert dog.advise(9.0) is Advice.NOTHING


def timing(**readings: float) -> Any:
    names = (
        "arrival_time",
        "first_scheduled_time",
        "first_token_time",
        "kv_cache_transfer_start",
        "kv_cache_transfer_end",
    )
    return SimpleNamespace(**{each: timedelta(seconds=readings.get(each, 0.0)) for each in names})


@pytest.mark.parametrize(
    ("engine", "queue_s", "prefill_s"),
    [
        (timing(first_scheduled_time=12.0, first_token_time=15.0), 2.0, 3.0),
        (None, 1.0, 5.0),
        # Not set, or of another clock.
        (timing(), 1.0, 5.0),
        (timing(first_scheduled_time=99.0, first_token_time=98.0), 1.0, 5.0),
    ],
)
def test_the_engines_times_are_the_segments_of_ttft(
    engine: Any, queue_s: float, prefill_s: float
) -> None:
    first = first_token_times(
        Phases(10.0),
        engine,
        submitted_s=10.0,
        asked_s=11.0,
        now_s=16.0,
        num_prompt=100,
        num_cached=40,
        batch_size=1,
    )

    assert first.spent_s[Segment.PREFILL_QUEUE] == queue_s
    assert first.spent_s[Segment.PREFILL] == prefill_s
    assert sum(first.spent_s.values()) == 6.0
    assert first.evaluated_prompt_tokens == 60


def test_the_transfer_is_told_by_who_fetched() -> None:
    assert transfer_s(timing(kv_cache_transfer_start=1.0, kv_cache_transfer_end=1.5)) == 0.5
    assert transfer_s(timing()) == 0.0

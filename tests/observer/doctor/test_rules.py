"""Causes that no virtual mesh has, from windows made by hand; and what too little tells."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.ledger import Segment
from services.observer.doctor import Cause, Clues, VolatileSpan, diagnose, examine
from services.observer.doctor.clues import Visit, clues_of, lost_tokens
from services.observer.doctor.diagnosis import BRINGS, RULES
from services.observer.doctor.facts import Facts
from services.observer.doctor.readings import (
    BLOCKS_CACHED,
    BLOCKS_RESERVED,
    BLOCKS_TOTAL,
    ENGINE_BUSY,
)
from services.observer.hygiene import report as hygiene_report
from services.observer.model import Generation, Member, Reading, Request, Window
from services.observer.past import read_past
from services.runtime.lag import PROBE_INTERVAL_S, LoopWatch
from tests.observer.chats import chat, prose, spelling
from tests.observer.made import a_request
from tests.observer.traffic import Traffic

BEGIN_UNIX_S = 1_800_000_000.0


def a_window(requests: Iterable[Request], *, lasts_s: float = 60.0, **changes: Any) -> Window:
    fields: dict[str, Any] = {
        "begin_unix_s": BEGIN_UNIX_S,
        "end_unix_s": BEGIN_UNIX_S + lasts_s,
        "requests": tuple(requests),
        "readings": (),
        "bubbles": (),
        "members": (Member("worker-1", "worker", "ready", "", "h", 1, ""),),
        "generations": (),
        "config": {"worker.num_slots": 8, "mesh.block_tokens": 64},
    }
    return Window(**{**fields, **changes})


def some(num_requests: int = 60, *, gap_s: float = 1.0, **changes: Any) -> list[Request]:
    """Short and quick, one after the other."""
    spent_s = {Segment.PREFILL: 0.02, Segment.TRANSFER: 0.001}
    fields = {"ttft_s": 0.021, "residual_s": 0.0, "spent_s": spent_s, "duration_s": 0.4}
    fields |= {"tpot_s": 0.01}
    return [
        a_request(
            trace_id=f"{number:032x}",
            hops=(),
            arrived_unix_s=BEGIN_UNIX_S + gap_s * number,
            **{**fields, **changes},
        )
        for number in range(num_requests)
    ]


def spending(segment: Segment, duration_s: float) -> list[Request]:
    spent_s = {segment: duration_s, Segment.PREFILL: 0.02}
    return some(spent_s=spent_s, ttft_s=0.02 + duration_s)


def causes(window: Window, clues: Clues | None = None) -> list[Cause]:
    return [each.cause for each in diagnose(window, clues)]


def undecided(window: Window, clues: Clues | None = None) -> dict[Cause, str]:
    return {each.cause: each.needs for each in examine(window, clues).undecided}


def test_nothing_is_said_of_few_requests() -> None:
    window = a_window(some(5))
    assert causes(window) == []
    assert undecided(window).keys() == RULES.keys()
    assert "there are 5" in undecided(window)[Cause.LOOP_LAG]
    assert causes(a_window([])) == []


def test_failed_requests_do_not_count() -> None:
    failed = some(30, ttft_s=None, error="WORKER_DIED")
    assert causes(a_window(failed)) == []


def test_every_cause_has_a_rule_and_brings_only_others() -> None:
    assert set(RULES) == set(Cause)
    for cause, brought in BRINGS.items():
        assert cause not in brought
    mutual = [(a, b) for a, others in BRINGS.items() for b in others if a in BRINGS.get(b, ())]
    assert mutual == []


async def test_a_blocked_loop_is_named_by_its_own_watch() -> None:
    with LoopWatch() as watch:
        time.sleep(PROBE_INTERVAL_S + 0.06)  # noqa: ASYNC251 the fault
        await asyncio.sleep(0.01)
        samples = list(watch.read())
    readings = [
        Reading(BEGIN_UNIX_S + 1, "router-1", "router", each.name, each.labels, each.value)
        for each in samples
    ]
    window = a_window(spending(Segment.TRANSFER, 0.05), readings=tuple(readings))
    assert causes(window)[0] is Cause.LOOP_LAG
    assert Cause.SLOW_NETWORK not in causes(window)


def test_one_rule_that_fails_silences_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(facts: Facts) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(RULES, Cause.COSTLY, fail)
    window = a_window(a_request(trace_id=f"{n:032x}") for n in range(60))
    judged = {each.cause: each.needs for each in examine(window).undecided}

    assert "its rule failed" in judged.pop(Cause.COSTLY)
    assert not any("its rule failed" in needs for needs in judged.values())


@pytest.mark.parametrize(
    ("segment", "cause"),
    [(Segment.PREPROCESS, Cause.SLOW_PREPROCESS), (Segment.TRANSFER, Cause.SLOW_NETWORK)],
)
def test_what_surrounds_the_engines_is_named(segment: Segment, cause: Cause) -> None:
    assert causes(a_window(spending(segment, 0.05)))[0] is cause
    assert causes(a_window(spending(segment, 0.002))) == []


def speculating(accepted: float, tpot_s: float, *, plain: int = 30) -> Window:
    drafted = {"drafted_tokens": 100, "accepted_tokens": int(100 * accepted), "tpot_s": tpot_s}
    return a_window([*some(60, **drafted), *some(plain, tpot_s=0.02)])


def test_speculation_that_saves_nothing_is_named() -> None:
    assert causes(speculating(0.58, 0.02))[0] is Cause.SPECULATION_DOES_NOT_PAY
    assert causes(speculating(0.1, 0.05))[0] is Cause.SPECULATION_DOES_NOT_PAY
    assert causes(speculating(0.1, 0.05, plain=0))[0] is Cause.SPECULATION_DOES_NOT_PAY


def test_speculation_that_pays_or_cannot_be_judged_is_not() -> None:
    assert causes(speculating(0.98, 0.004)) == []
    window = speculating(0.8, 0.02, plain=0)
    assert causes(window) == []
    assert "to compare with" in undecided(window)[Cause.SPECULATION_DOES_NOT_PAY]


def test_answers_without_a_pace_are_nothing_to_compare_with() -> None:
    drafted = some(60, drafted_tokens=100, accepted_tokens=80)
    window = a_window([*drafted, *some(30, tpot_s=0.0)])
    assert "to compare with" in undecided(window)[Cause.SPECULATION_DOES_NOT_PAY]


def test_a_window_in_which_nothing_took_time_is_judged_too() -> None:
    requests = some(ttft_s=0.0, spent_s={Segment.PREFILL: 0.3}, cached_tokens=0)
    lost = {each.trace_id: 100 for each in requests}
    clues = Clues(spans=(), evicted_tokens=lost, recomputed_tokens=lost)
    assert Cause.KV_CACHE_TOO_SMALL in causes(a_window(requests), clues)


def drifting(lengthened: float, *, prompts: float = 1.0, key: str = "worker.kv_type") -> Window:
    chance = random.Random(1)
    requests = []
    for each in some(200):
        is_new = each.arrived_unix_s >= BEGIN_UNIX_S + 100
        length = chance.expovariate(1 / 60) * (lengthened if is_new else 1.0)
        prompt = 100 * chance.uniform(0.5, 1.5) * (prompts if is_new else 1.0)
        requests.append(
            dataclasses.replace(
                each,
                generation=2 if is_new else 1,
                output_tokens=2 + int(length),
                prompt_tokens=64 + int(prompt),
            )
        )
    generations = (
        Generation(1, BEGIN_UNIX_S, {}),
        Generation(2, BEGIN_UNIX_S + 100, {key: ("bf16", "q8_0")}),
    )
    return a_window(requests, lasts_s=200, generations=generations)


@pytest.mark.parametrize("lengthened", [0.4, 2.0, 10.0])
def test_answers_that_change_with_the_precision_are_drift(lengthened: float) -> None:
    assert causes(drifting(lengthened))[0] is Cause.QUALITY_DRIFT


def test_drift_needs_a_change_of_precision_and_like_prompts() -> None:
    assert causes(drifting(1.0)) == []
    assert causes(drifting(2.0, key="router.max_queue")) == []
    window = drifting(2.0, prompts=4.0)
    assert Cause.QUALITY_DRIFT not in causes(window)
    assert "differ in length" in undecided(window)[Cause.QUALITY_DRIFT]


def blocks(used: float, *, lasts_s: float) -> tuple[Reading, ...]:
    values = {BLOCKS_CACHED: used, BLOCKS_RESERVED: 8.0, BLOCKS_TOTAL: 1000.0}
    return tuple(
        Reading(BEGIN_UNIX_S + share * lasts_s, "worker-1", "worker", name, (), value)
        for share in (0.0, 0.3, 0.6, 0.9)
        for name, value in values.items()
    )


def test_a_cache_of_which_little_is_ever_used_is_too_large() -> None:
    requests = some(250, gap_s=2.0)
    window = a_window(requests, lasts_s=600, readings=blocks(20, lasts_s=600))
    assert causes(window) == [Cause.KV_CACHE_TOO_LARGE]
    assert causes(a_window(requests, lasts_s=600, readings=blocks(400, lasts_s=600))) == []
    short = a_window(some(60), readings=blocks(20, lasts_s=60))
    assert causes(short) == []
    assert "a window of" in undecided(short)[Cause.KV_CACHE_TOO_LARGE]


def test_a_time_stamp_in_every_prompt_is_named_from_what_hygiene_found() -> None:
    traffic = Traffic()
    for number in range(40):
        stamp = f"Current time: 2026-03-01 10:{number // 60:02}:{number % 60:02}. "
        ids = chat(stamp + prose(0, 120), f"question {number}")
        traffic.ask(ids, ttft_s=0.06, spent_s={Segment.PREFILL: 0.06}, tpot_s=0.01)
    window = dataclasses.replace(traffic.window, config={})
    hygiene = hygiene_report(window, traffic.prompts, spelling=spelling())
    clues = clues_of((), window.members, hygiene)
    assert clues.spans
    first = diagnose(window, clues)[0]
    assert first.cause is Cause.NONCE_IN_PREFIX
    assert "time stamp" in first.summary

    # Without the vocabulary nobody can say that it is no question.
    unread = clues_of((), window.members, hygiene_report(window, traffic.prompts, spelling=None))
    assert unread.spans is None
    assert Cause.NONCE_IN_PREFIX not in [each.cause for each in diagnose(window, unread)]


@pytest.mark.parametrize("factor", [2.5, 10.0])
def test_a_worker_that_came_late_and_computes_slowly_at_first_is_cold(factor: float) -> None:
    warm = some(120, gap_s=0.5, prompt_tokens=1000, cached_tokens=800)
    cold = [
        dataclasses.replace(
            each,
            worker_id="worker-2",
            arrived_unix_s=BEGIN_UNIX_S + 30 + number / 4,
            cached_tokens=0,
            spent_s={Segment.PREFILL: 0.02 * factor},
            ttft_s=0.021 * factor,
        )
        for number, each in enumerate(warm[:40])
    ]
    later = [
        dataclasses.replace(each, worker_id="worker-2", arrived_unix_s=BEGIN_UNIX_S + 45 + n / 4)
        for n, each in enumerate(warm[:60])
    ]
    assert causes(a_window([*warm, *cold, *later]))[0] is Cause.COLD_START


def waiting(worker_ids: Iterable[str], **changes: Any) -> Window:
    """Each request waits for half a second in the router."""
    spent_s = {Segment.QUEUE: 0.5, Segment.PREFILL: 0.02}
    requests = some(60, duration_s=1.0, ttft_s=0.52, spent_s=spent_s)
    members = tuple(Member(each, "worker", "ready", "", "h", 1, "") for each in worker_ids)
    return a_window(requests, members=members, **changes)


def test_a_worker_that_nobody_asks_is_idle_behind_the_queue() -> None:
    assert causes(waiting(["worker-1", "worker-2"]))[0] is Cause.IDLE_ENGINE_BEHIND_QUEUE


def test_a_worker_that_is_gone_is_not_idle() -> None:
    gone = tuple(
        Reading(BEGIN_UNIX_S + at_s, "worker-2", "worker", ENGINE_BUSY, (), 5.0) for at_s in (0, 1)
    )
    busy = some(60, gap_s=1.0, duration_s=1.6, ttft_s=0.52, spent_s={Segment.QUEUE: 0.5})
    members = (Member("worker-1", "worker", "ready", "", "h", 1, ""),)
    window = a_window(busy, members=members, readings=gone)
    assert Cause.IDLE_ENGINE_BEHIND_QUEUE not in causes(window)


def test_a_small_span_is_no_finding() -> None:
    span = VolatileSpan(description="a counter", trace_ids=(), tokens=10)
    assert causes(a_window(some()), Clues(spans=(span,))) == []


def test_misses_of_unknown_prompts_are_undecided() -> None:
    slow = {Segment.PREFILL: 0.6}
    window = a_window(some(spent_s=slow, ttft_s=0.6, cached_tokens=0, prompt_tokens=4000))
    assert causes(window) == []
    needed = undecided(window)
    assert "had been computed before" in needed[Cause.LONG_PREFILL_FROM_MISSES]
    assert Cause.NONCE_IN_PREFIX in needed
    unique = Clues(spans=(), evicted_tokens={}, recomputed_tokens={})
    assert causes(window, unique) == [Cause.LONG_PREFILL_FROM_MISSES]


def test_full_caches_without_the_prompts_blocks_are_undecided() -> None:
    window = a_window(
        some(spent_s={Segment.PREFILL: 0.1}, ttft_s=0.1), readings=blocks(990, lasts_s=60)
    )
    assert Cause.KV_CACHE_TOO_SMALL in undecided(window)


def test_a_worker_that_counts_its_busy_time_is_believed() -> None:
    readings = [
        Reading(BEGIN_UNIX_S + at_s, name, "worker", ENGINE_BUSY, (), 0.02 * at_s)
        for name in ("worker-1", "worker-2")
        for at_s in range(0, 300, 10)
    ]
    members = tuple(
        Member(name, "worker", "ready", "", "h", 1, "") for name in ("worker-1", "worker-2")
    )
    window = a_window(some(250, gap_s=1.2), lasts_s=300, readings=tuple(readings), members=members)
    assert causes(window) == [Cause.COSTLY]


seconds = st.sampled_from([0.0, 1e-6, 0.01, 0.3, 20.0])
tokens = st.sampled_from([0, 1, 63, 64, 5000])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.builds(
            a_request,
            trace_id=st.sampled_from(["a" * 32, "b" * 32]),
            hops=st.just(()),
            arrived_unix_s=st.floats(BEGIN_UNIX_S, BEGIN_UNIX_S + 60),
            ttft_s=st.none() | seconds,
            duration_s=seconds,
            tpot_s=st.none() | seconds,
            spent_s=st.dictionaries(st.sampled_from(list(Segment)), seconds),
            worker_id=st.sampled_from(["", "worker-1", "worker-2"]),
            strategy=st.sampled_from(["", "kv_aware", "random", "prefix_aware"]),
            prompt_tokens=tokens,
            cached_tokens=tokens,
            output_tokens=tokens,
            loaded_blocks=tokens,
            load_s=seconds,
            drafted_tokens=tokens,
            accepted_tokens=tokens,
            generation=st.integers(1, 2),
        ),
        min_size=20,
        max_size=60,
    ),
    st.sampled_from(
        [Clues(), Clues(spans=(), evicted_tokens={"a" * 32: 640}, recomputed_tokens={})]
    ),
)
def test_no_window_makes_it_fail(requests: list[Request], clues: Clues) -> None:
    generation = Generation(2, BEGIN_UNIX_S, {"worker.kv_type": ("bf16", "q8_0")})
    window = a_window(requests, readings=blocks(990, lasts_s=60), generations=(generation,))
    document = examine(window, clues).plain()
    json.dumps(document, allow_nan=False)
    assert all(0 <= each["share"] <= 1 for each in document["findings"])


def a_visit(trace_id: str, worker_id: str, at_s: float, cached: int, keys: bytes) -> Visit:
    chain = [bytes([key]) for key in keys]
    return Visit(trace_id, worker_id, at_s, at_s + 0.5, cached, chain, 64)


def test_what_a_prompt_lost_is_told_from_who_had_it_before() -> None:
    visits = [
        a_visit("first", "a", 0.0, 0, b"xyz"),
        a_visit("evicted", "a", 1.0, 64, b"xyz"),
        a_visit("elsewhere", "b", 2.0, 0, b"xyw"),
        a_visit("too early", "c", 2.1, 0, b"xyw"),
        a_visit("found", "a", 3.0, 192, b"xyz"),
    ]
    clues = lost_tokens(visits, alive={"a", "b", "c"})
    assert clues.evicted_tokens == {"evicted": 128}
    assert clues.recomputed_tokens == {"evicted": 128, "elsewhere": 128, "too early": 128}
    assert lost_tokens(visits, alive=()).recomputed_tokens == {}


def test_prompts_that_were_told_give_the_same() -> None:
    traffic = Traffic()
    ids = list(range(100))
    traffic.ask(ids)
    again = traffic.ask(ids, cached_tokens=0)
    elsewhere = traffic.ask(ids, worker_id="w2", cached_tokens=0)
    window = traffic.window
    clues = clues_of(read_past(window, traffic.prompts), window.members)
    assert clues.evicted_tokens == {again: 96}
    assert clues.recomputed_tokens == {again: 96, elsewhere: 96}

"""Requests that wait: for an engine that has nothing to do, for slots, or for a full mesh. Pure."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from services.core.ledger import Segment
from services.observer.doctor.facts import Facts, WorkerFacts
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.timeline import Coverage, Spans, most_at_once
from services.observer.doctor.words import at_least, at_most, ms, of_ttft, percent
from services.observer.statistics import Floats, mean

MIN_SHARE, MIN_EXPLAINED_S = 0.2, 0.01
# A queue for slots, and one before engines that are all busy, is long from here on.
LONG_SHARE, LONG_S = 0.4, 0.05
FULL_SHARE, FULL_S = 0.6, 0.1
# Engines that compute prompts for less than this could take more requests at once.
FREE_FOR_MORE = 0.6
# Requests that run at once, of those that may: all slots are taken.
SLOTS_TAKEN = 0.95
# An engine busier than this has no room.
BUSY = 0.9


def idle_engine_behind_queue(facts: Facts) -> Finding | Undecided | None:
    idle_s = _waited_while_idle_s(facts)
    explains_s = mean(idle_s)
    if explains_s >= max(MIN_SHARE * facts.mean_ttft_s, MIN_EXPLAINED_S):
        return _idle(facts, idle_s, explains_s)
    return _slots(facts)


def overloaded(facts: Facts) -> Finding | Undecided | None:
    waited_s = facts.waited_s
    explains_s = mean(waited_s)
    busy = [each.busy_share for each in facts.workers]
    working_s = mean(facts.prefill_s)
    is_waiting = explains_s >= max(FULL_SHARE * facts.mean_ttft_s, FULL_S, 2 * working_s)
    if not is_waiting or not busy or min(busy) < BUSY:
        return None
    working = sum(float(each.prefilling.lengths_s.sum()) for each in facts.workers)
    return Finding(
        cause=Cause.OVERLOADED,
        summary=(
            f"Requests wait {ms(explains_s)} on average, and all engines are busy: there are too"
            " few workers for this load."
        ),
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            _waited(facts),
            Evidence("least busy engine", percent(min(busy)), at_least(percent(BUSY))),
            Evidence(
                "of that, computing prompts",
                percent(working / facts.duration_s / len(facts.workers)),
            ),
        ),
        trace_ids=facts.worst(waited_s),
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def _idle(facts: Facts, idle_s: Floats, explains_s: float) -> Finding:
    held: dict[str, float] = defaultdict(float)
    for bubble in facts.window.bubbles:
        held[bubble.stage] += bubble.duration_s
    most = sorted(held.items(), key=lambda each: -each[1])[:3]
    holders = [f"{stage} {ms(duration_s)}" for stage, duration_s in most]
    in_router = mean(facts.spent_s[Segment.QUEUE]) >= mean(facts.spent_s[Segment.PREFILL_QUEUE])
    where = "in the router's queue" if in_router else "inside the workers"
    return Finding(
        cause=Cause.IDLE_ENGINE_BEHIND_QUEUE,
        summary=(
            f"Requests wait {where} while engines that could take them are idle:"
            f" {ms(explains_s)} of their {ms(mean(facts.waited_s))}."
        ),
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            _waited(facts),
            Evidence(
                "waited while an engine was idle",
                ms(explains_s),
                at_least(f"{percent(MIN_SHARE)} of the mean TTFT"),
            ),
            *_busy(facts),
            *((Evidence("idle engines, by who held the work", ", ".join(holders)),) * bool(held)),
        ),
        trace_ids=facts.worst(idle_s),
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def _slots(facts: Facts) -> Finding | None:
    """All slots are taken, by answers that leave the engine room for more."""
    explains_s = mean(facts.spent_s[Segment.QUEUE])
    slots = facts.config("worker.num_slots")
    if slots is None or explains_s < max(LONG_SHARE * facts.mean_ttft_s, LONG_S):
        return None
    workers = facts.answering
    at_once = [most_at_once(each.active) for each in workers]
    computing = [_computing_share(facts, each) for each in workers]
    if min(at_once, default=0) < SLOTS_TAKEN * slots or max(computing) > FREE_FOR_MORE:
        return None
    return Finding(
        cause=Cause.IDLE_ENGINE_BEHIND_QUEUE,
        summary=(
            f"Requests wait for one of {slots} slots while engines compute prompts for"
            f" {percent(max(computing))} of the time: they have room for more at once."
        ),
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            _waited(facts),
            Evidence("requests at once, each worker", f"{min(at_once)} of {slots}"),
            Evidence(
                "time for prompts, busiest engine",
                percent(max(computing)),
                at_most(percent(FREE_FOR_MORE)),
            ),
        ),
        trace_ids=facts.worst(facts.spent_s[Segment.QUEUE]),
        setting="worker.num_slots",
        before=slots,
        after=2 * slots,
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def _waited_while_idle_s(facts: Facts) -> Floats:
    """Of each request: waiting in a router, while some worker had nothing to do; waiting in its
    worker, while that one had nothing to do."""
    queue_s, inside_s = facts.spent_s[Segment.QUEUE], facts.spent_s[Segment.PREFILL_QUEUE]
    begin_s = facts.first_s - facts.ttft_s
    in_router = Spans(begin_s, begin_s + queue_s)
    computed_from_s = facts.first_s - facts.prefill_s
    inside = Spans(computed_from_s - inside_s, computed_from_s)
    idle_s = np.zeros(facts.num_requests)
    for worker in facts.answering:
        met = in_router.within(*worker.alive_s)
        idle_s = np.maximum(idle_s, met.lengths_s - Coverage(worker.active).union_within(met))
    for worker in facts.workers:
        here = facts.prefill_ids == worker.id
        busy_s = Coverage(worker.active).union_within(inside)
        idle_s[here] += (inside.lengths_s - busy_s)[here]
    return np.maximum(0.0, idle_s)


def _computing_share(facts: Facts, worker: WorkerFacts) -> float:
    return Coverage(worker.prefilling).union_s / facts.duration_s


def _waited(facts: Facts) -> Evidence:
    queue_s, inside_s = (
        mean(facts.spent_s[segment]) for segment in (Segment.QUEUE, Segment.PREFILL_QUEUE)
    )
    return Evidence(
        "mean wait in the router, and in the worker",
        f"{ms(queue_s)} + {ms(inside_s)} of {ms(facts.mean_ttft_s)}",
        at_least(percent(MIN_SHARE)),
    )


def _busy(facts: Facts) -> tuple[Evidence, ...]:
    shares = {each.id: each.busy_share for each in facts.answering}
    if not shares:
        return ()
    name = min(shares, key=lambda each: shares[each])
    return (Evidence("least busy engine", f"{name}: {percent(shares[name])}"),)

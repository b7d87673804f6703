"""What the processes around the engines take. Pure."""

from __future__ import annotations

import numpy as np

from services.core.ledger import Segment
from services.observer.doctor.facts import Facts
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.readings import GC_PAUSES, LOOP_LAG
from services.observer.doctor.words import at_least, ms, of_ttft, percent
from services.observer.statistics import Floats, mean, quantile

MIN_SHARE = 0.25
# A loop that is so late, one time in a hundred, holds requests up.
LATE_LOOP_S = 0.02
# It is named where it may explain this share of the mean TTFT, or is late by so much.
MIN_LAG_SHARE, BLOCKED_LOOP_S = 0.1, 0.1
# Of the mean TTFT, at least, from where on it is worth a thought.
MIN_PREPROCESS_S, MIN_TRANSFER_S = 0.01, 0.01
# Where requests pass: other processes' loops hold up nobody.
REQUEST_SERVICES = frozenset(("gateway", "router", "tokenizer", "worker"))


def loop_lag(facts: Facts) -> Finding | Undecided | None:
    # Starting takes a moment; what counts lasts.
    lags = [
        (series, quantile(series.values, 0.75))
        for series in facts.readings.series(LOOP_LAG, quantile="0.99")
        if series.service in REQUEST_SERVICES
    ]
    late = [(series, lag_s) for series, lag_s in lags if lag_s >= LATE_LOOP_S]
    if not late:
        return None
    series, lag_s = max(late, key=lambda each: each[1])
    outside_s = _outside_engines_s(facts)
    explains_s = min(mean(outside_s), sum(each for _, each in late))
    if explains_s < MIN_LAG_SHARE * facts.mean_ttft_s and lag_s < BLOCKED_LOOP_S:
        return None
    gc_share = facts.readings.per_s(GC_PAUSES).get(series.member_id, 0.0)
    return Finding(
        cause=Cause.LOOP_LAG,
        summary=(
            f"The event loop of {series.service} {series.member_id} is {ms(lag_s)} late at P99: it"
            " is blocked by what should not run on it, or its machine is too busy."
        ),
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(
            Evidence("loop lag, P99", ms(lag_s), at_least(ms(LATE_LOOP_S))),
            Evidence("mean TTFT that no engine and no queue took", ms(mean(outside_s))),
            Evidence("time in garbage collection", percent(gc_share)),
        ),
        trace_ids=facts.worst(outside_s),
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def slow_preprocess(facts: Facts) -> Finding | Undecided | None:
    spent_s = facts.spent_s[Segment.PREPROCESS]
    explains_s = mean(spent_s)
    if explains_s < max(MIN_SHARE * facts.mean_ttft_s, MIN_PREPROCESS_S):
        return None
    threads = facts.config("tokenizer.threads")
    return Finding(
        cause=Cause.SLOW_PREPROCESS,
        summary=f"Rendering and encoding prompts takes {ms(explains_s)} on average.",
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(Evidence("mean preprocess", ms(explains_s), at_least(percent(MIN_SHARE))),),
        trace_ids=facts.worst(spent_s),
        setting="tokenizer.threads",
        before=threads,
        after=None if threads is None else 2 * threads,
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def slow_network(facts: Facts) -> Finding | Undecided | None:
    spent_s = facts.spent_s[Segment.TRANSFER]
    explains_s = mean(spent_s)
    if explains_s < max(MIN_SHARE * facts.mean_ttft_s, MIN_TRANSFER_S):
        return None
    return Finding(
        cause=Cause.SLOW_NETWORK,
        summary=f"Requests spend {ms(explains_s)} between processes on average.",
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(Evidence("mean transfer", ms(explains_s), at_least(percent(MIN_SHARE))),),
        trace_ids=facts.worst(spent_s),
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def _outside_engines_s(facts: Facts) -> Floats:
    residual_s = facts.column(each.residual_s for each in facts.requests)
    outside = (Segment.PREPROCESS, Segment.ROUTE, Segment.TRANSFER)
    return np.maximum(0.0, residual_s) + sum(facts.spent_s[each] for each in outside)

"""Workers that have just begun, with empty caches and engines that are not warm. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from services.observer.doctor.facts import MIN_REQUESTS, Facts, Mask
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.readings import ENGINE_BUSY
from services.observer.doctor.words import at_least, ms, of_ttft, times
from services.observer.statistics import mean, quantile

MIN_SHARE, MIN_EXPLAINED_S = 0.15, 0.005
# The first requests of a worker: one of these numbers, and of all at most this share.
NUM_FIRST, MOST_FIRST = (5, 10, 20, 40, 80), 0.5
# How much later they are, and how much more of them is computed, or how much slower.
SLOWER, COMPUTED_MORE, COMPUTED_SLOWER = 1.6, 1.5, 1.5
# Where all engines have worked no longer than this at their first readings, the mesh has just
# begun. A worker whose readings begin so late is new, where it has worked little so far; readings
# are kept some seconds apart.
JUST_BEGUN_S, LATE_S, LITTLE_S, OLD_S = 0.5, 3.0, 1.0, 15.0
LATE_SHARE = 0.15


def cold_start(facts: Facts) -> Finding | Undecided | None:
    begun = _begun(facts)
    if not begun:
        return None
    first = _first_requests(facts, begun)
    rest = ~first
    if not first.any():
        return None
    later_s = mean(facts.ttft_s[first]) - mean(facts.ttft_s[rest])
    explains_s = later_s * float(first.sum()) / facts.num_requests
    computed = [mean(facts.computed_tokens[mask]) for mask in (first, rest)]
    rates = [_rate(facts, mask) for mask in (first, rest)]
    is_cold = computed[0] >= COMPUTED_MORE * computed[1] or (
        min(rates) > 0 and rates[0] * COMPUTED_SLOWER <= rates[1]
    )
    is_late = mean(facts.ttft_s[first]) >= SLOWER * mean(facts.ttft_s[rest])
    if not is_cold or not is_late:
        return None
    if explains_s < max(MIN_SHARE * facts.mean_ttft_s, MIN_EXPLAINED_S):
        return None
    return Finding(
        cause=Cause.COLD_START,
        summary=(
            f"The first requests at {', '.join(sorted(begun)[:3])} took"
            f" {ms(mean(facts.ttft_s[first]))}, later ones {ms(mean(facts.ttft_s[rest]))}: it had"
            " just begun."
        ),
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(
            Evidence(
                "TTFT of the first / of later ones",
                times(mean(facts.ttft_s[first]) / mean(facts.ttft_s[rest])),
                at_least(times(SLOWER)),
            ),
            Evidence(
                "prompt tokens computed a request, first and later",
                f"{computed[0]:.0f}, {computed[1]:.0f}",
                at_least(f"{times(COMPUTED_MORE)} as many, or"),
            ),
            Evidence(
                "prompt tokens a second, first and later",
                f"{rates[0]:.0f}, {rates[1]:.0f}",
                at_least(f"{times(COMPUTED_SLOWER)} slower"),
            ),
        ),
        trace_ids=facts.worst(facts.ttft_s, of=first),
        expected=of_ttft(explains_s, facts.mean_ttft_s) + "; it passes by itself",
    )


def _begun(facts: Facts) -> dict[str, float]:
    """Workers that began in this window, and when."""
    begun: dict[str, float] = {}
    at_start: dict[str, float] = {}
    begin_unix_s = facts.window.begin_unix_s
    for series in facts.readings.series(ENGINE_BUSY):
        first_s = series.times_s[0] - begin_unix_s
        falls = [
            then
            for then, (before, after) in zip(
                series.times_s[1:], itertools.pairwise(series.values), strict=True
            )
            if after < before
        ]
        if falls:
            begun[series.member_id] = falls[-1] - begin_unix_s
        elif first_s > OLD_S or (first_s > LATE_S and series.values[0] <= LITTLE_S):
            begun[series.member_id] = 0.0
        elif series.values[0] <= JUST_BEGUN_S:
            at_start[series.member_id] = 0.0
    known = {each.id for each in facts.workers}
    if not begun and not at_start and not any(facts.readings.series(ENGINE_BUSY)):
        return _came_late(facts)
    if known and known <= at_start.keys():
        return at_start  # the whole mesh
    return {name: at_s for name, at_s in begun.items() if name in known}


def _came_late(facts: Facts) -> dict[str, float]:
    """Without readings: workers whose first request comes when others have had many."""
    begun = {}
    for worker in facts.answering:
        if worker.num_requests:
            first_s = float(facts.arrived_s[worker.mask].min())
            num_before = int((facts.arrived_s < first_s).sum())
            if first_s > LATE_SHARE * facts.duration_s and num_before >= MIN_REQUESTS:
                begun[worker.id] = 0.0
    return begun


def _first_requests(facts: Facts, begun: Mapping[str, float]) -> Mask:
    """Of each that has begun, as many as explain most."""
    best, most_s = np.zeros(facts.num_requests, bool), 0.0
    for number in NUM_FIRST:
        first = np.zeros(facts.num_requests, bool)
        for worker in facts.workers:
            if worker.id in begun:
                places = np.flatnonzero(worker.mask & (facts.first_s >= begun[worker.id]))
                first[places[:number]] = True
        if not first.any() or first.sum() > MOST_FIRST * facts.num_requests:
            continue
        later_s = mean(facts.ttft_s[first]) - mean(facts.ttft_s[~first])
        if later_s * first.sum() > most_s:
            best, most_s = first, later_s * float(first.sum())
    return best


def _rate(facts: Facts, mask: Mask) -> float:
    telling = mask & (facts.computed_tokens >= 64) & (facts.prefill_s > 0)
    rates = facts.computed_tokens[telling] / facts.prefill_s[telling]
    return quantile(rates, 0.5) if rates.size else 0.0

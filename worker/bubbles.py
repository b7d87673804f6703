"""Time in which the engine had nothing to do though there was work for it somewhere. Pure.

A gap between two steps is judged when it ends: what the requests that are here by then
went through during it, here by this clock, and before they came here by the durations
that they bring with them, laid end to end before their arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from services.core.ledger import Interval, Segment
from worker import sequence as request
from worker.messages import Bubble

# Shorter gaps are the loop's own work between two steps: see ShortGaps.
LEAST_GAP_S = 0.0005
# The stage that holds the work of requests that are already answering.
CORE = "core"

# What a request went through, in order.
Before: TypeAlias = Sequence[tuple[Segment, float]]


class Gap(NamedTuple):
    began_s: float
    ended_s: float

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


class ShortGaps:
    """Gaps not worth looking into one by one. There is one between any two steps."""

    def __init__(self) -> None:
        self._sum_s = 0.0

    def add(self, gap: Gap) -> list[Bubble]:
        """Told when they make a long one together."""
        self._sum_s += gap.duration_s
        if self._sum_s < LEAST_GAP_S:
            return []
        bubble, self._sum_s = Bubble(CORE, self._sum_s), 0.0
        return [bubble]


def lay_out(before: Before, arrived_s: float) -> list[Interval]:
    """Durations as intervals that end with the arrival, the earliest first."""
    laid: list[Interval] = []
    end_s = arrived_s
    for segment, duration_s in reversed(before):
        laid.append(Interval(segment, end_s - duration_s, end_s))
        end_s -= duration_s
    return laid[::-1]


def charge(
    gap: Gap, waits: Iterable[Iterable[Interval]], *, answering_from_s: float
) -> dict[str, float]:
    """Seconds by stage, as the request has it that was on its way for most of the gap.

    `waits`: what each request went through that had no first token yet. `answering_from_s`:
    since when there are requests that have one, which nothing but the loop kept from their
    next step; infinite: there are none.
    """
    best: dict[str, float] = {}
    for intervals in waits:
        found: dict[str, float] = {}
        for segment, start_s, end_s in intervals:
            overlap_s = min(end_s, gap.ended_s) - max(start_s, gap.began_s)
            if overlap_s > 0:
                # A first token is being sampled when its step has ended.
                stage = CORE if segment is Segment.PREFILL else str(segment)
                found[stage] = found.get(stage, 0.0) + overlap_s
        if sum(found.values()) > sum(best.values()):
            best = found
    answering_s = gap.ended_s - max(gap.began_s, answering_from_s)
    left_s = min(answering_s, gap.duration_s - sum(best.values()))
    if left_s > 0:
        best = {**best, CORE: best.get(CORE, 0.0) + left_s}
    return best


def judge(gap: Gap, present: Iterable[request.Sequence]) -> list[Bubble]:
    """`present`: the requests that the core has when the gap ends."""
    waits, answering_from_s = [], math.inf
    for each in present:
        if each.finished:
            continue
        ended_s = each.phases.ended_s
        if ended_s is not None:
            answering_from_s = min(answering_from_s, ended_s)
        # A hand-off's first step may come when its phases have ended.
        if ended_s is None or ended_s > gap.began_s:
            came_s = each.submit.submitted_s
            waits.append(lay_out(each.submit.before, came_s) + each.phases.until(gap.ended_s))
    charged = charge(gap, waits, answering_from_s=answering_from_s)
    return [Bubble(stage, duration_s) for stage, duration_s in charged.items()]

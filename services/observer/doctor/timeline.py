"""When something went on, and for how much of another time. Pure.

Intervals of a worker come from one process's clock or, where hops are missing, from that of
whoever saw the requests arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from services.observer.statistics import Floats


class Spans(NamedTuple):
    """As many intervals as there are requests, in seconds."""

    begin_s: Floats
    end_s: Floats

    @property
    def lengths_s(self) -> Floats:
        return np.maximum(0.0, self.end_s - self.begin_s)

    def where(self, mask: np.ndarray) -> Spans:
        return Spans(self.begin_s[mask], self.end_s[mask])

    def within(self, begin_s: float, end_s: float) -> Spans:
        """What of each lies in between; perhaps nothing."""
        begins = np.clip(self.begin_s, begin_s, end_s)
        return Spans(begins, np.maximum(begins, np.clip(self.end_s, begin_s, end_s)))


class Coverage:
    """The union of intervals, and their sum, up to any time."""

    def __init__(self, spans: Spans) -> None:
        is_span = spans.end_s > spans.begin_s
        begins, ends = np.sort(spans.begin_s[is_span]), np.sort(spans.end_s[is_span])
        times = np.concatenate([begins, ends])
        order = np.argsort(times, kind="stable")
        steps = np.concatenate([np.ones_like(begins), -np.ones_like(ends)])[order]
        self._times = times[order]
        active = np.cumsum(steps)[:-1]
        lengths = np.diff(self._times)
        self._union = np.concatenate([[0.0], np.cumsum(lengths * (active > 0))])
        self._sum = np.concatenate([[0.0], np.cumsum(lengths * active)])

    @property
    def union_s(self) -> float:
        """How long there was at least one."""
        return float(self._union[-1]) if self._times.size else 0.0

    def union_within(self, spans: Spans) -> Floats:
        """Of each of `spans`, how long there was at least one."""
        return self._within(self._union, spans)

    def sum_within(self, spans: Spans) -> Floats:
        """Of each of `spans`, the time of all that overlap it together."""
        return self._within(self._sum, spans)

    def _within(self, cumulated: Floats, spans: Spans) -> Floats:
        if not self._times.size:
            return np.zeros_like(spans.begin_s)
        begin, end = (np.interp(each, self._times, cumulated) for each in spans)
        return np.maximum(0.0, end - begin)


def most_at_once(spans: Spans) -> int:
    """How many overlap at most."""
    is_span = spans.end_s > spans.begin_s
    events = [(at_s, 1) for at_s in spans.begin_s[is_span]]
    events += [(at_s, -1) for at_s in spans.end_s[is_span]]
    most = now = 0
    for _, step in sorted(events):
        now += step
        most = max(most, now)
    return most


def merged(spans: Iterable[Spans]) -> Spans:
    every = list(spans)
    if not every:
        return Spans(np.zeros(0), np.zeros(0))
    return Spans(
        np.concatenate([each.begin_s for each in every]),
        np.concatenate([each.end_s for each in every]),
    )

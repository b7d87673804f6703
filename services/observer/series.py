"""What metrics are made of: counts, levels and histograms by their labels, each bounded. Pure."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from services.core.metrics import Labels, Metric

# Stands for all values of a label beyond those that are told apart.
OTHER = "other"
# Label sets of one metric that are told apart.
MAX_SERIES = 2000


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    # Levels by the label `quantile`.
    SUMMARY = "summary"


class Point(NamedTuple):
    """One series now. Of a histogram, `value` is the sum of what was observed."""

    labels: Labels
    value: float
    # Of a histogram: how many fell into each bucket; the last has no upper bound.
    counts: tuple[int, ...] = ()
    # The process that told it; empty: the observer itself.
    service: str = ""
    member_id: str = ""


class Family(NamedTuple):
    """All series of one metric."""

    metric: Metric
    kind: Kind
    points: tuple[Point, ...]
    # Of a histogram: the buckets' upper bounds.
    bounds: tuple[float, ...] = ()


class Names:
    """Values of one label: the first `most` keep their name, all others share OTHER."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(name)
        return name


class Counter:
    """It only grows."""

    def __init__(self, name: str, unit: str, text: str) -> None:
        self.metric = Metric(name, unit, text, True)
        self._values: dict[Labels, float] = {}

    def add(self, value: float, **labels: str) -> None:
        """`labels` may name what a keyword cannot be: see `dotted`."""
        key = _bounded(dotted(labels), self._values)
        self._values[key] = self._values.get(key, 0.0) + value

    def family(self) -> Family:
        points = tuple(Point(labels, value) for labels, value in self._values.items())
        return Family(self.metric, Kind.COUNTER, points)


class Histogram:
    """What was observed, by bucket. `bounds` rise."""

    def __init__(self, name: str, unit: str, text: str, bounds: tuple[float, ...]) -> None:
        self.metric = Metric(name, unit, text, True)
        self.bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, **labels: str) -> None:
        """`value` is 0 at least: sums only grow."""
        key = _bounded(dotted(labels), self._sums)
        if key not in self._sums:
            self._counts[key] = [0] * (len(self.bounds) + 1)
        self._counts[key][bisect_left(self.bounds, value)] += 1
        self._sums[key] = self._sums.get(key, 0.0) + value

    def family(self) -> Family:
        return Family(self.metric, Kind.HISTOGRAM, tuple(self._points()), self.bounds)

    def _points(self) -> Iterator[Point]:
        for labels, value in self._sums.items():
            yield Point(labels, value, tuple(self._counts[labels]))


def dotted(labels: dict[str, str]) -> Labels:
    """Keywords as attributes: gen_ai__request__model is gen_ai.request.model."""
    return tuple((name.replace("__", "."), value) for name, value in labels.items())


def _bounded(labels: Labels, known: dict[Labels, float]) -> Labels:
    if labels in known or len(known) < MAX_SERIES:
        return labels
    return tuple((name, OTHER) for name, _ in labels)

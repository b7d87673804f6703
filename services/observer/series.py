"""What metrics are made of: counts, levels and histograms by their labels, each bounded. Pure."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from services.core.metrics import Labels, Metric

# Stands for all values of a label beyond those that are told apart.
OTHER = "other"
# Label sets of one metric that are told apart.
MAX_SERIES = 2000
NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    # Levels by the label `quantile`.
    SUMMARY = "summary"


class Example(NamedTuple):
    """One of those that a bucket counts, by its trace."""

    trace_id: str
    value: float
    unix_s: float


class Point(NamedTuple):
    """One series now. Of a histogram, `value` is the sum of what was observed."""

    labels: Labels
    value: float
    # Of a histogram: how many fell into each bucket; the last has no upper bound.
    counts: tuple[int, ...] = ()
    # The process that told it; empty: the observer itself.
    service: str = ""
    member_id: str = ""
    # Of a histogram: the latest of each bucket, where one was given.
    examples: tuple[Example | None, ...] = ()


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

    def add(self, value: float, labels: Mapping[str, str] = NO_LABELS) -> None:
        key = _bounded(labels, self._values)
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
        self._examples: dict[Labels, list[Example | None]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(
        self,
        value: float,
        labels: Mapping[str, str] = NO_LABELS,
        example: Example | None = None,
    ) -> None:
        """`value` is 0 at least: sums only grow."""
        key = _bounded(labels, self._sums)
        if key not in self._sums:
            self._counts[key] = [0] * (len(self.bounds) + 1)
            self._examples[key] = [None] * (len(self.bounds) + 1)
        bucket = bisect_left(self.bounds, value)
        self._counts[key][bucket] += 1
        self._sums[key] = self._sums.get(key, 0.0) + value
        if example is not None:
            self._examples[key][bucket] = example

    def family(self) -> Family:
        return Family(self.metric, Kind.HISTOGRAM, tuple(self._points()), self.bounds)

    def _points(self) -> Iterator[Point]:
        for labels, value in self._sums.items():
            examples = tuple(self._examples[labels])
            yield Point(labels, value, tuple(self._counts[labels]), examples=examples)


def _bounded(labels: Mapping[str, str], known: Mapping[Labels, float]) -> Labels:
    key = tuple(labels.items())
    if key in known or len(known) < MAX_SERIES:
        return key
    return tuple((name, OTHER) for name in labels)

"""What processes counted and measured, by name, member and labels. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from services.observer.model import Reading

ENGINE_BUSY = "firsttoken.worker.engine.busy"
BLOCKS_CACHED = "firsttoken.worker.kv.cached"
BLOCKS_RESERVED = "firsttoken.worker.kv.reserved"
BLOCKS_TOTAL = "firsttoken.worker.kv.capacity"
LOOP_LAG = "firsttoken.process.loop.lag"
GC_PAUSES = "firsttoken.process.gc.pauses"


class Series(NamedTuple):
    """Of one member and one set of labels, in the order of time."""

    member_id: str
    service: str
    labels: Mapping[str, str]
    times_s: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def span_s(self) -> float:
        return self.times_s[-1] - self.times_s[0]

    @property
    def growth(self) -> float:
        """Of a count. A process that began anew begins at 0 again."""
        pairs = itertools.pairwise(self.values)
        return sum(after - before if after >= before else after for before, after in pairs)

    @property
    def per_s(self) -> float | None:
        return self.growth / self.span_s if self.span_s > 0 else None

    @property
    def steps_per_s(self) -> list[float]:
        """The same, between each two readings."""
        points = list(zip(self.times_s, self.values, strict=True))
        return [
            max(0.0, after - before) / (then - now)
            for (now, before), (then, after) in itertools.pairwise(points)
            if then > now
        ]


class Readings:
    def __init__(self, readings: Iterable[Reading]) -> None:
        self._by_name: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[Reading]]]
        self._by_name = defaultdict(lambda: defaultdict(list))
        for each in readings:
            self._by_name[each.name][each.member_id, each.labels].append(each)

    def series(self, name: str, **labels: str) -> Iterator[Series]:
        """Those that have these labels."""
        for (member_id, own), values in self._by_name.get(name, {}).items():
            if labels.items() <= dict(own).items():
                ordered = sorted(values, key=lambda each: each.unix_s)
                yield Series(
                    member_id,
                    ordered[-1].service,
                    dict(own),
                    tuple(each.unix_s for each in ordered),
                    tuple(each.value for each in ordered),
                )

    def last(self, name: str) -> dict[str, float]:
        """By member; those of several labels are added."""
        sums: dict[str, float] = defaultdict(float)
        for each in self.series(name):
            sums[each.member_id] += each.values[-1]
        return dict(sums)

    def per_s(self, name: str) -> dict[str, float]:
        """Of a count, by member."""
        sums: dict[str, float] = defaultdict(float)
        for each in self.series(name):
            if (rate := each.per_s) is not None:
                sums[each.member_id] += rate
        return dict(sums)

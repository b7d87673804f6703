"""What members say of their load, out of their readings. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from services.observer.model import Reading
from services.observer.rows import seconds
from services.observer.state_fields import LoadRow

# Rates are of this time, or of what is known of it.
RATE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    title: str
    # "request", "share", "second" or "byte".
    unit: str
    # Those of the metrics that have the label, added.
    metrics: tuple[str, ...]
    label: tuple[str, str] | None = None
    # How much it grows in a second.
    is_rate: bool = False
    # As a share of this metric. Nothing where that is 0.
    over: str = ""


# In the order to show.
LOADS = (
    Load(title="busy", unit="share", metrics=("firsttoken.worker.engine.busy",), is_rate=True),
    Load(
        title="running",
        unit="request",
        metrics=("firsttoken.worker.requests",),
        label=("state", "running"),
    ),
    Load(
        title="waiting",
        unit="request",
        metrics=("firsttoken.worker.requests",),
        label=("state", "waiting"),
    ),
    Load(
        title="of its KV",
        unit="share",
        metrics=("firsttoken.worker.kv.cached", "firsttoken.worker.kv.reserved"),
        over="firsttoken.worker.kv.capacity",
    ),
    Load(title="at workers", unit="request", metrics=("firsttoken.router.requests.in_flight",)),
    Load(title="waiting", unit="request", metrics=("firsttoken.router.requests.waiting",)),
    Load(title="in flight", unit="request", metrics=("firsttoken.gateway.requests.in_flight",)),
    Load(
        title="of node memory",
        unit="share",
        metrics=("firsttoken.kvstore.blocks",),
        label=("tier", "l1"),
        over="firsttoken.kvstore.capacity",
    ),
    Load(
        title="loop lag P99",
        unit="second",
        metrics=("firsttoken.process.loop.lag",),
        label=("quantile", "0.99"),
    ),
    Load(title="memory", unit="byte", metrics=("firsttoken.process.memory",)),
)
_WANTED = {name for load in LOADS for name in (*load.metrics, load.over)}


class Track:
    """Of one metric of one member with one set of labels: what it is, and how fast it grows."""

    __slots__ = ("first", "last")

    def __init__(self, reading: Reading) -> None:
        self.first = self.last = reading

    def add(self, reading: Reading) -> None:
        if reading.unix_s >= self.last.unix_s:
            self.last = reading
        if reading.unix_s < self.first.unix_s:
            self.first = reading

    @property
    def growth(self) -> float:
        """Of a count. A process that began anew began at 0."""
        grown = self.last.value - self.first.value
        return grown if grown >= 0 else self.last.value

    @property
    def per_s(self) -> float:
        passed_s = self.last.unix_s - self.first.unix_s
        return self.growth / passed_s if passed_s > 0 else 0.0


class Tracks:
    """Readings from a time on, by member and metric."""

    def __init__(
        self, readings: Iterable[Reading], names: Iterable[str], *, since_unix_s: float
    ) -> None:
        wanted = set(names)
        self._tracks: dict[tuple[str, str], dict[tuple[tuple[str, str], ...], Track]]
        self._tracks = defaultdict(dict)
        for reading in readings:
            if reading.name in wanted and reading.unix_s >= since_unix_s:
                by_labels = self._tracks[reading.member_id, reading.name]
                if (track := by_labels.get(reading.labels)) is None:
                    by_labels[reading.labels] = Track(reading)
                else:
                    track.add(reading)

    def of_member(
        self, member_id: str, name: str, label: tuple[str, str] | None = None
    ) -> list[Track]:
        by_labels = self._tracks.get((member_id, name), {})
        return [track for labels, track in by_labels.items() if label is None or label in labels]

    def of_all(self, name: str, label: tuple[str, str] | None = None) -> list[Track]:
        members = {member_id for member_id, metric in self._tracks if metric == name}
        return [each for one in sorted(members) for each in self.of_member(one, name, label)]


def load_tracks(readings: Iterable[Reading], now_unix_s: float) -> Tracks:
    return Tracks(readings, _WANTED, since_unix_s=now_unix_s - RATE_S)


def load_of(tracks: Tracks, member_id: str) -> list[LoadRow]:
    rows = []
    for load in LOADS:
        found = [
            track
            for name in load.metrics
            for track in tracks.of_member(member_id, name, load.label)
        ]
        if not found:
            continue
        value = sum(track.per_s if load.is_rate else track.last.value for track in found)
        if load.over:
            whole = tracks.of_member(member_id, load.over, load.label)
            size = sum(track.last.value for track in whole)
            if size <= 0:
                continue
            value /= size
        rows.append(LoadRow(name=load.title, unit=load.unit, value=seconds(value)))
    return rows

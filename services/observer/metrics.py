"""All metrics of a mesh: what its requests add up to, and what its processes tell. Pure.

metrics = Metrics()
metrics.configure(slo_ttft_s=0.5, block_tokens=64)
metrics.describe(metric)               what samples of a name are, from a report's MetricInfo
metrics.hear(reading)                  each sample
metrics.add(request)                   each request, once it is whole
metrics.add_bubble(bubble)
metrics.set_dropped(sender, number)    hops that a process could not tell
metrics.set_members(members, generation)
exposition.render(metrics.families(now), accept)     for GET /metrics
OtlpMetrics(endpoint, read=...)                      for a collector
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from services.core.metrics import Labels, Metric
from services.observer.model import BubbleSum, Member, Reading, Request
from services.observer.request_metrics import RequestMetrics
from services.observer.series import Family, Kind, Names, Point

# A series that is not told again for so long is gone.
STALE_S = 15.0
# Of one process.
MAX_SAMPLES = 2000
# Names of metrics that processes tell.
MAX_METRICS = 1000
MAX_STAGES = 16
# Of one series.
MAX_LABELS = 16
MAX_CHARACTERS = 200

_BUBBLES = Metric(
    "firsttoken.worker.engine.bubble",
    "s",
    "Time in which a worker's engine had nothing to do though there was work for it, by the"
    " stage that held the work.",
    True,
)
_MEMBERS = Metric("firsttoken.members", "{process}", "Processes of the mesh.", False)
_GENERATION = Metric(
    "firsttoken.config.generation", "{generation}", "The configuration in force.", False
)
_DROPPED = Metric(
    "firsttoken.observer.dropped", "{hop}", "Hops that a process could not tell the observer.", True
)
_REFUSED = Metric(
    "firsttoken.observer.refused",
    "{sample}",
    "Samples not taken: a process told too many, or of too many metrics.",
    True,
)
# Those of which the observer itself is the author.
OWN_METRICS = (_BUBBLES, _MEMBERS, _GENERATION, _DROPPED, _REFUSED)


class Sender(NamedTuple):
    """A process that tells."""

    service: str
    member_id: str


class _Told(NamedTuple):
    value: float
    unix_s: float


class Metrics:
    """Use it from one thread. Bounded, whatever comes."""

    def __init__(self) -> None:
        self._requests = RequestMetrics()
        self._infos: dict[str, Metric] = {}
        self._told: dict[Sender, dict[tuple[str, Labels], _Told]] = {}
        self._bubbles: dict[str, dict[str, float]] = {}
        self._stages = Names(MAX_STAGES)
        self._dropped: dict[Sender, int] = {}
        self._members: dict[tuple[str, str], int] = {}
        self._generation = 0
        self._num_refused = 0

    def configure(self, *, slo_ttft_s: float, block_tokens: int) -> None:
        """`slo_ttft_s`: a first token that comes later counts as slow."""
        self._requests.slo_ttft_s = slo_ttft_s
        self._requests.block_tokens = block_tokens

    def describe(self, metric: Metric) -> None:
        """Whoever says it last is believed."""
        if len(metric.name) <= MAX_CHARACTERS and (
            metric.name in self._infos or len(self._infos) < MAX_METRICS
        ):
            self._infos[metric.name] = metric._replace(text=metric.text[:MAX_CHARACTERS])

    def hear(self, reading: Reading) -> None:
        series = self._told.setdefault(Sender(reading.service, reading.member_id), {})
        key = reading.name, reading.labels
        if key not in series and not self._has_room_for(reading, len(series)):
            self._num_refused += 1
            return
        # A level, until somebody says what it is.
        unknown = Metric(reading.name, "", reading.name, False)
        self._infos.setdefault(reading.name, unknown)
        series[key] = _Told(reading.value, reading.unix_s)

    def _has_room_for(self, reading: Reading, num_series: int) -> bool:
        texts = (reading.name, *(text for pair in reading.labels for text in pair))
        return (
            num_series < MAX_SAMPLES
            and len(reading.labels) <= MAX_LABELS
            and max(map(len, texts)) <= MAX_CHARACTERS
            and (reading.name in self._infos or len(self._infos) < MAX_METRICS)
        )

    def add(self, request: Request) -> None:
        self._requests.add(request)

    def add_bubble(self, bubble: BubbleSum) -> None:
        stages = self._bubbles.setdefault(bubble.worker_id, {})
        stage = self._stages.of(bubble.stage)
        stages[stage] = stages.get(stage, 0.0) + max(0.0, bubble.duration_s)

    def set_dropped(self, sender: Sender, num_hops: int) -> None:
        """Since that process's start."""
        self._dropped[sender] = num_hops

    def set_members(self, members: Iterable[Member], generation: int) -> None:
        """All there are. What others told is forgotten."""
        present, self._members, self._generation = set(), {}, generation
        for member in members:
            present.add(member.id)
            key = member.role, member.state
            self._members[key] = self._members.get(key, 0) + 1
        for table in (self._told, self._dropped):
            for sender in [each for each in table if each.member_id not in present]:
                del table[sender]
        for worker_id in self._bubbles.keys() - present:
            del self._bubbles[worker_id]

    def families(self, now_unix_s: float) -> list[Family]:
        """All metrics that have a value; series of a process that fell silent are left out."""
        told = self._families_told(now_unix_s)
        every = (*self._requests.families(), *self._own(), *told)
        return [family for family in every if family.points]

    def _own(self) -> Iterator[Family]:
        bubbles = (
            Point((("stage", stage),), duration_s, (), "worker", worker_id)
            for worker_id, stages in self._bubbles.items()
            for stage, duration_s in stages.items()
        )
        yield Family(_BUBBLES, Kind.COUNTER, tuple(bubbles))
        members = (
            Point((("role", role), ("state", state)), count)
            for (role, state), count in self._members.items()
        )
        yield Family(_MEMBERS, Kind.GAUGE, tuple(members))
        yield Family(_GENERATION, Kind.GAUGE, (Point((), self._generation),))
        # Also where there are none: what is not there does not grow.
        dropped = (
            Point((), self._dropped.get(sender, 0), (), *sender)
            for sender in self._told.keys() | self._dropped.keys()
        )
        yield Family(_DROPPED, Kind.COUNTER, tuple(dropped))
        yield Family(_REFUSED, Kind.COUNTER, (Point((), self._num_refused),))

    def _families_told(self, now_unix_s: float) -> Iterator[Family]:
        points: dict[str, list[Point]] = {}
        for sender, series in list(self._told.items()):
            for key in [k for k, told in series.items() if now_unix_s - told.unix_s > STALE_S]:
                del series[key]
            if not series:
                del self._told[sender]
            for (name, labels), told in series.items():
                points.setdefault(name, []).append(Point(labels, told.value, (), *sender))
        for name, found in points.items():
            yield Family(self._infos[name], self._kind(name, found), tuple(found))

    def _kind(self, name: str, points: Iterable[Point]) -> Kind:
        if self._infos[name].counts:
            return Kind.COUNTER
        if all(any(label == "quantile" for label, _ in point.labels) for point in points):
            return Kind.SUMMARY
        return Kind.GAUGE

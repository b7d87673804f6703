"""Metrics as Prometheus reads them: its own text format, or OpenMetrics.

Names are what OpenTelemetry's compatibility rules make of them, so that a query finds the
same series whether they come from here or through a collector: dots become underscores,
the unit is added, and _total to what counts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import Metric as PrometheusMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar

from services.core.metrics import Labels, Metric
from services.observer.series import Family, Kind, Point

_UNITS = {"s": "seconds", "By": "bytes", "1": "ratio"}
_PER = {"s": "second"}
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")
_SUFFIXES = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_count", "_sum"),
    Kind.SUMMARY: ("",),
}
_ANNOTATION = re.compile(r"\{[^}]*\}")


class Rendered(NamedTuple):
    body: bytes
    content_type: str


def render(families: Iterable[Family], accept: str = "") -> Rendered:
    """`accept`: the request's header of this name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(tuple(families)))
    encode, content_type = choose_encoder(accept)
    return Rendered(encode(registry), content_type)


def prometheus_name(metric: Metric) -> str:
    """Without the _total of a counter."""
    name = _plain(metric.name)
    unit = prometheus_unit(metric.unit)
    return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


def prometheus_unit(unit: str) -> str:
    """A UCUM unit in words; "" for a count of things."""
    what, _, per = _ANNOTATION.sub("", unit).partition("/")
    words = [_UNITS.get(what, what)] if what else []
    if per:
        words += ["per", _PER.get(per, per)]
    return _NOT_IN_NAMES.sub("_", "_".join(words)).strip("_")


def series_names(metric: Metric, kind: Kind) -> tuple[str, ...]:
    """What its series are called in PromQL."""
    return tuple(prometheus_name(metric) + suffix for suffix in _SUFFIXES[kind])


class _Collected(Collector):
    def __init__(self, families: tuple[Family, ...]) -> None:
        self._families = families

    def collect(self) -> Iterator[PrometheusMetric]:
        """Of two that would share a name, the first: else Prometheus would take nothing at all."""
        taken: set[str] = set()
        for family in self._families:
            names = {prometheus_name(family.metric), *series_names(family.metric, family.kind)}
            if taken.isdisjoint(names):
                taken |= names
                yield _to_prometheus(family)


def _to_prometheus(family: Family) -> PrometheusMetric:
    name = prometheus_name(family.metric)
    told = PrometheusMetric(name, family.metric.text, family.kind.value)
    seen: set[frozenset[tuple[str, str]]] = set()
    for point in family.points:
        labels = _labels(point)
        if (key := frozenset(labels.items())) in seen:
            continue
        seen.add(key)
        if family.kind is Kind.HISTOGRAM:
            _add_buckets(told, name, labels, family, point)
        else:
            told.add_sample(series_names(family.metric, family.kind)[0], labels, point.value)
    return told


def _add_buckets(
    told: PrometheusMetric, name: str, labels: dict[str, str], family: Family, point: Point
) -> None:
    bounds = [*map(str, family.bounds), "+Inf"]
    cumulative = list(itertools.accumulate(point.counts))
    for bound, count, example in zip(bounds, cumulative, point.examples, strict=True):
        exemplar = None
        if example is not None:
            exemplar = Exemplar({"trace_id": example.trace_id}, example.value, example.unix_s)
        told.add_sample(f"{name}_bucket", {**labels, "le": bound}, count, exemplar=exemplar)
    told.add_sample(f"{name}_count", labels, cumulative[-1])
    told.add_sample(f"{name}_sum", labels, point.value)


def _labels(point: Point) -> dict[str, str]:
    identity: Labels = ()
    if point.member_id:
        identity = (("service", point.service), ("instance", point.member_id))
    return {_plain(name): value for name, value in (*point.labels, *identity)}


def _plain(name: str) -> str:
    """Letters, digits and underscores; two of those at the beginning are Prometheus' own."""
    plain = _NOT_IN_NAMES.sub("_", name).strip("_")
    return plain if plain[:1].isalpha() else f"x_{plain}"

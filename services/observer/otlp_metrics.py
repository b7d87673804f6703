"""Metrics on their way to an OTLP collector, each under the process that told it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from services.observer.series import Family, Kind, Point
from services.runtime.tasks import end_tasks

EXPORT_INTERVAL_S = 10.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

_SCOPE = InstrumentationScope("firsttoken")
_CUMULATIVE = AggregationTemporality.CUMULATIVE

logger = logging.getLogger(__name__)


class _Times(NamedTuple):
    start_unix_ns: int
    now_unix_ns: int


class OtlpMetrics:
    """An async context manager that exports what `read` says, now and then.

    `read` is called on the loop. A collector that is dead or slow costs only a thread that
    waits, and what it misses is in the next export: values are cumulative.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        member_id: str,
        read: Callable[[], Sequence[Family]],
        interval_s: float = EXPORT_INTERVAL_S,
    ) -> None:
        self._member_id = member_id
        self._read = read
        self._interval_s = interval_s
        self._began_unix_ns = time.time_ns()
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._failed = False
        self._endpoint = endpoint

    async def __aenter__(self) -> OtlpMetrics:
        self._exporting = asyncio.create_task(self._keep_exporting(), name="export metrics")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Export once more, as far as CLOSE_TIMEOUT_S lets it."""
        await end_tasks([self._exporting])
        closing = asyncio.ensure_future(self._export())
        try:
            await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        finally:
            # Ends the call in progress and the wait for another try.
            await asyncio.to_thread(self._exporter.shutdown)
        await closing

    async def _keep_exporting(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._export()

    async def _export(self) -> None:
        families, now_ns = self._read(), time.time_ns()

        def export() -> MetricExportResult:
            data = to_otlp(families, self._member_id, self._began_unix_ns, now_ns)
            return self._exporter.export(data)

        try:
            result = await asyncio.to_thread(export)
        except Exception:  # what OTLP has no form for, such as a count beyond 63 bits
            logger.exception("metrics could not be written as OTLP")
            return
        failed = result is not MetricExportResult.SUCCESS
        if failed and not self._failed:
            logger.warning("metrics are not exported: %s does not take them", self._endpoint)
        self._failed = failed


def to_otlp(
    families: Iterable[Family], observer_id: str, began_unix_ns: int, now_unix_ns: int
) -> MetricsData:
    """One resource for each process, and one for the observer with what it has of itself."""
    by_process: dict[tuple[str, str], list[Metric]] = {}
    for family in families:
        points: dict[tuple[str, str], list[Point]] = {}
        for point in family.points:
            points.setdefault((point.service, point.member_id), []).append(point)
        for process, found in points.items():
            metric = _metric(family, found, began_unix_ns, now_unix_ns)
            by_process.setdefault(process, []).append(metric)
    return MetricsData(
        [
            _of_process(service or "observer", member_id or observer_id, metrics)
            for (service, member_id), metrics in by_process.items()
        ]
    )


def _of_process(service: str, member_id: str, metrics: list[Metric]) -> ResourceMetrics:
    resource = Resource({"service.name": service, "service.instance.id": member_id})
    return ResourceMetrics(resource, [ScopeMetrics(_SCOPE, metrics, "")], "")


def _metric(
    family: Family, points: Sequence[Point], began_unix_ns: int, now_unix_ns: int
) -> Metric:
    times = _Times(began_unix_ns, now_unix_ns)
    data: Gauge | Histogram | Sum
    if family.kind is Kind.HISTOGRAM:
        data = Histogram([_histogram(family, point, times) for point in points], _CUMULATIVE)
    else:
        numbers = [
            NumberDataPoint(
                attributes=dict(point.labels),
                start_time_unix_nano=times.start_unix_ns,
                time_unix_nano=times.now_unix_ns,
                value=point.value,
            )
            for point in points
        ]
        counts = family.kind is Kind.COUNTER
        data = Sum(numbers, _CUMULATIVE, is_monotonic=True) if counts else Gauge(numbers)
    return Metric(family.metric.name, family.metric.text, family.metric.unit, data)


def _histogram(family: Family, point: Point, times: _Times) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=dict(point.labels),
        count=sum(point.counts),
        sum=point.value,
        bucket_counts=point.counts,
        explicit_bounds=family.bounds,
        # Not kept. Infinite ones say nothing wrong.
        min=math.inf,
        max=-math.inf,
        start_time_unix_nano=times.start_unix_ns,
        time_unix_nano=times.now_unix_ns,
    )

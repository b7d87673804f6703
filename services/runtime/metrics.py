"""Counts and levels of one process, on their way to an OTLP collector."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from services.core.metrics import Metric
from services.runtime.tasks import end_tasks

EXPORT_INTERVAL_S = 10.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0


class MetricsExporter:
    """An async context manager that exports what `read` says, now and then.

    `read` is called on the loop and gives a number for each metric, by name. A collector that
    is dead or slow costs only a thread that waits.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        member_id: str,
        metrics: Iterable[Metric],
        read: Callable[[], Mapping[str, float]],
        interval_s: float = EXPORT_INTERVAL_S,
    ) -> None:
        self._read = read
        self._interval_s = interval_s
        self._values: Mapping[str, float] = {}
        exporter = OTLPMetricExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        # It never collects by itself: a thread of its own would read what the loop changes.
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        identity = {"service.name": service, "service.instance.id": member_id}
        self._provider = MeterProvider(
            [reader], resource=Resource(identity), shutdown_on_exit=False
        )
        meter = self._provider.get_meter("firsttoken")
        for metric in metrics:
            observers = [self._observer(metric.name)]
            if metric.counts:
                meter.create_observable_counter(metric.name, observers, metric.unit, metric.text)
            else:
                meter.create_observable_gauge(metric.name, observers, metric.unit, metric.text)

    async def __aenter__(self) -> MetricsExporter:
        self._exporting = asyncio.create_task(self._export(), name="export metrics")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Export once more, as far as CLOSE_TIMEOUT_S lets it."""
        await end_tasks([self._exporting])
        closing = asyncio.ensure_future(self._flush())
        try:
            await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        finally:
            # Ends the call in progress and the wait for another try.
            self._provider.shutdown()
        await closing

    async def _export(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._flush()

    async def _flush(self) -> None:
        self._values = self._read()
        await asyncio.to_thread(self._provider.force_flush, EXPORT_TIMEOUT_S * 1e3)

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            value = self._values.get(name)
            return () if value is None else (Observation(value),)

        return observe

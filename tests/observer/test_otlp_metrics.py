from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2

from services.core.metrics import Metric
from services.observer.metrics import Metrics, Sender
from services.observer.model import Reading
from services.observer.otlp_metrics import OtlpMetrics
from services.runtime.server import MeshServer
from tests.observer.made import a_request
from tests.runtime.waiting import eventually

NOW_S = 1_800_000_000.0


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the latest of each metric, by the process that it is of."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.num_exports = 0
        self.metrics: dict[tuple[str, str], dict[str, metrics_pb2.Metric]] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        self.num_exports += 1
        for resource in request.resource_metrics:
            said = {each.key: each.value.string_value for each in resource.resource.attributes}
            identity = said["service.name"], said["service.instance.id"]
            for scope in resource.scope_metrics:
                known = self.metrics.setdefault(identity, {})
                known |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, server = Collector(), MeshServer("127.0.0.1:0", service_names=[])
    add: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server  # untyped
    add(collector, server.server)
    async with server:
        collector.endpoint = f"http://{server.address}"
        yield collector
        await server.stop(grace_s=0)


def exporting(metrics: Metrics, endpoint: str) -> OtlpMetrics:
    return OtlpMetrics(
        endpoint, member_id="observer-1", read=lambda: metrics.families(NOW_S), interval_s=0.02
    )


async def test_metrics_are_exported_under_the_process_that_told_them() -> None:
    metrics = Metrics()
    metrics.describe(Metric("firsttoken.test.steps", "{step}", "Steps.", True))
    metrics.hear(Reading(NOW_S, "worker-1", "worker", "firsttoken.test.steps", (("a", "b"),), 3.0))
    metrics.add(a_request(ttft_s=0.07))
    async with collecting() as collector:
        async with exporting(metrics, collector.endpoint):
            await eventually(lambda: collector.num_exports > 1)
            metrics.add(a_request(ttft_s=0.3))
        steps = collector.metrics["worker", "worker-1"]["firsttoken.test.steps"]
        own = collector.metrics["observer", "observer-1"]
    [point] = steps.sum.data_points
    assert steps.sum.is_monotonic
    assert steps.unit == "{step}"
    assert point.as_double == 3.0
    assert [(each.key, each.value.string_value) for each in point.attributes] == [("a", "b")]
    [ttft] = own["gen_ai.server.time_to_first_token"].histogram.data_points
    assert own["gen_ai.server.time_to_first_token"].unit == "s"
    assert ttft.count == 2  # the last one came as it closed
    assert dict(zip([*ttft.explicit_bounds, float("inf")], ttft.bucket_counts, strict=True)) == {
        **dict.fromkeys([*ttft.explicit_bounds, float("inf")], 0),
        0.08: 1,
        0.5: 1,
    }


async def test_a_number_that_otlp_cannot_say_does_not_end_the_exports() -> None:
    metrics, worker = Metrics(), Sender("worker", "worker-1")
    metrics.hear(Reading(NOW_S, "worker-1", "worker", "firsttoken.test.level", (), 3.0))
    metrics.set_dropped(worker, 2**64 - 1)
    async with collecting() as collector, exporting(metrics, collector.endpoint):
        await asyncio.sleep(0.1)
        metrics.set_dropped(worker, 7)
        await eventually(lambda: collector.num_exports > 1)
        metrics.set_dropped(worker, 2**64 - 1)  # and leaving does not fail


async def test_a_dead_collector_holds_nobody_up() -> None:
    async with OtlpMetrics("http://127.0.0.1:1", member_id="observer-1", read=list):
        pass

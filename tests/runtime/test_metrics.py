from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2

from services.core.metrics import Metric
from services.runtime.metrics import MetricsExporter
from services.runtime.server import MeshServer
from tests.runtime.waiting import eventually

METRICS = [
    Metric("firsttoken.test.requests", "{request}", "Requests.", True),
    Metric("firsttoken.test.waiting", "{request}", "That wait.", False),
]


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.metrics: dict[str, metrics_pb2.Metric] = {}
        self.services: set[str] = set()

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            self.services |= {
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.instance.id"
            }
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


async def test_counts_and_levels_are_exported_now_and_then_and_at_the_end() -> None:
    collector, server = Collector(), MeshServer("127.0.0.1:0", service_names=[])
    add: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server  # untyped
    add(collector, server.server)
    values = {"firsttoken.test.requests": 3, "firsttoken.test.waiting": 1}

    def number(name: str) -> int:
        metric = collector.metrics[f"firsttoken.test.{name}"]
        [point] = metric.sum.data_points or metric.gauge.data_points
        return point.as_int

    async with server:
        exporter = MetricsExporter(
            f"http://{server.address}",
            service="router",
            member_id="r-1",
            metrics=METRICS,
            read=lambda: values,
            interval_s=0.02,
        )
        async with exporter:
            await eventually(lambda: len(collector.metrics) == 2)
            assert number("requests") == 3
            values["firsttoken.test.requests"] = 5
            await eventually(lambda: number("requests") == 5)
            values["firsttoken.test.waiting"] = 0
        assert number("waiting") == 0
        await server.stop(grace_s=0)
    requests = collector.metrics["firsttoken.test.requests"]
    assert requests.sum.is_monotonic
    assert requests.unit == "{request}"
    assert collector.services == {"r-1"}


async def test_a_dead_collector_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    async with MetricsExporter(
        "http://127.0.0.1:1", service="r", member_id="r", metrics=METRICS, read=dict
    ):
        pass

"""A real OTLP collector, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)
from opentelemetry.proto.trace.v1 import trace_pb2

from services.runtime.server import MeshServer


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes them and keeps none."""

    async def Export(self, request: Any, context: Any) -> Any:
        return metrics_service_pb2.ExportMetricsServiceResponse()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent. While `silent`, it does not answer."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.silent = False
        self.received: list[trace_pb2.ResourceSpans] = []

    async def Export(self, request: Any, context: Any) -> Any:
        if self.silent:
            await asyncio.Event().wait()
        self.received.extend(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[trace_pb2.Span]:
        return [
            span
            for resource in self.received
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def by_name(self) -> dict[str, trace_pb2.Span]:
        """The last of each name."""
        return {span.name: span for span in self.spans}

    def named(self, name: str) -> trace_pb2.Span:
        """The only one."""
        [span] = [span for span in self.spans if span.name == name]
        return span


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    server = MeshServer("127.0.0.1:0", service_names=[])
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # untyped
    add(collector, server.server)
    add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_metrics(_Metrics(), server.server)
    async with server:
        collector.endpoint = f"http://{server.address}"
        yield collector
        await server.stop(grace_s=0)


def attributes_of(holder: Any) -> dict[str, object]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in holder.attributes
    }

"""DirectService: answers for callers that come past the routers, with a router's ticket."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

import grpc

from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.config import Snapshot
from services.core.errors import Overloaded
from services.core.settings import MeshConfig
from services.core.tenants import ANYBODY, Tenant, Tenants
from services.runtime.identity import CallBounds
from services.runtime.interceptor import Context
from worker.planned import PlannedAnswers
from worker.service import WorkerServicer

Handler: TypeAlias = (
    "grpc.RpcMethodHandler[direct_pb2.GenerateRequest, worker_pb2.GenerateResponse]"
)

SERVICE_NAME = direct_pb2.DESCRIPTOR.services_by_name["DirectService"].full_name


class DirectServicer:
    def __init__(self, worker: WorkerServicer, plans: PlannedAnswers) -> None:
        self._worker = worker
        self._plans = plans

    def add_to(self, server: grpc.aio.Server) -> None:
        # A worker's own messages have the same wire layout.
        generate: Handler = grpc.unary_stream_rpc_method_handler(
            self.Generate,
            request_deserializer=direct_pb2.GenerateRequest.FromString,
            response_serializer=worker_pb2.GenerateResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Generate": generate})
        server.add_generic_rpc_handlers((handlers,))

    async def Generate(self, request: direct_pb2.GenerateRequest, context: Context) -> None:
        # The responses are written there: a generator would not hear that its time is over
        # while a message waits for a caller that does not read.
        await self._plans.give(request, context, self._worker.Generate)


class DirectEdge:
    """As services.runtime.identity.Edge: the ticket says who calls, and who counted the call."""

    tenants = Tenants(MeshConfig())

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    @property
    def call_bounds(self) -> CallBounds:
        settings = self._snapshot().config.router
        return CallBounds(settings.max_deadline_s, settings.request_timeout_s)

    def admit(self, tenant: Tenant) -> contextlib.AbstractContextManager[object]:
        assert tenant is ANYBODY
        return contextlib.nullcontext()

    def refused(self, context: Context, tenant: Tenant, error: Overloaded, since_s: float) -> None:
        raise AssertionError("nobody is refused here")

"""DirectService: answers for callers that come past the routers, with a router's ticket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeAlias

import grpc

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.config import Snapshot
from services.core.errors import DeadlineExceeded, MeshError, Overloaded
from services.core.settings import MeshConfig
from services.core.tenants import ANYBODY, Tenant, Tenants
from services.core.tickets import KeyRing
from services.runtime.identity import CallBounds
from services.runtime.interceptor import Context, write
from services.runtime.protocol import LEDGER_KEY
from worker.plan_reports import PlanReports, PlanRun
from worker.service import WorkerServicer
from worker.tickets import TicketDesk

Handler: TypeAlias = (
    "grpc.RpcMethodHandler[direct_pb2.GenerateRequest, worker_pb2.GenerateResponse]"
)

SERVICE_NAME = direct_pb2.DESCRIPTOR.services_by_name["DirectService"].full_name


class DirectServicer:
    def __init__(
        self,
        worker: WorkerServicer,
        desk: TicketDesk,
        reports: PlanReports,
        *,
        keys: Callable[[], KeyRing],
    ) -> None:
        self._worker = worker
        self._desk = desk
        self._reports = reports
        self._keys = keys

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
        # It writes the responses itself: a generator would not hear that its time is over
        # while a message waits for a caller that does not read.
        plan = self._desk.admit(self._keys(), request, time.time())
        call = worker_pb2.GenerateRequest.FromString(request.call)
        with self._reports.run(plan) as run:
            try:
                async with asyncio.timeout(plan.max_duration_s) as deadline:
                    responses = contextlib.aclosing(self._worker.Generate(call, context))
                    async with responses as answer:
                        async for response in answer:
                            run.note(response)
                            await write(response, context)
            except TimeoutError:
                if not deadline.expired():
                    raise
                error = DeadlineExceeded(
                    "the time that the router gave this request is over (router.max_deadline_s,"
                    " or its own deadline)",
                    reason="MAX_DEADLINE",
                )
                _note_failure(run, error, context)
                raise error from None
            except Exception as error:
                _note_failure(run, error, context)
                raise


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


def _note_failure(run: PlanRun, error: Exception, context: Context) -> None:
    reason = error.reason if isinstance(error, MeshError) else "INTERNAL"
    told = (value for key, value in context.trailing_metadata() or () if key == LEDGER_KEY)
    ledger = next(told, None)
    run.fail(
        reason,
        str(error) or reason,
        common_pb2.Ledger.FromString(ledger) if isinstance(ledger, bytes) else None,
    )

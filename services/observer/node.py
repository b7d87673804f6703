"""The observer as a node: a member of the mesh that all others tell how they are."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from contextlib import AsyncExitStack

from firsttoken.control.v1 import control_pb2
from firsttoken.observer.v1 import observer_pb2_grpc
from services.observer.answers import Answers
from services.observer.books import Books
from services.observer.explained_spans import ExplainedSpans
from services.observer.http import make_app
from services.observer.page_server import PageServer
from services.observer.service import SERVICE_NAME, ObserverService
from services.runtime.membership import ControlClient
from services.runtime.reporter import Reporter
from services.runtime.resource import Resource
from services.runtime.server import MeshServer
from services.runtime.startup import parse_listen
from services.runtime.tasks import end_tasks
from services.runtime.tls import Tls

TICK_S = 0.25
# Its streams are held open by others for as long as they live.
STOP_GRACE_S = 0.3

logger = logging.getLogger(__name__)


class ObserverNode(Resource):
    """An async context manager: entered, it is a ready member of the mesh, its page at `.address`.

    Entering raises StartupError or InvalidArgument when it cannot be.
    """

    def __init__(
        self,
        *,
        control: str,
        listen: str = "127.0.0.1:0",
        report_listen: str = "",
        tls: Tls | None = None,
    ) -> None:
        self._control = control
        self._listen = listen
        self._report_listen = report_listen or f"{parse_listen(listen).host}:0"
        self._tls = tls
        self.id = f"observer-{uuid.uuid4().hex[:8]}"
        self.address = ""
        self.report_address = ""

    @property
    def books(self) -> Books:
        return self._books

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{self.address}"

    async def _open(self, stack: AsyncExitStack) -> None:
        control = await stack.enter_async_context(
            ControlClient(self._control, self._member(), tls=self._tls)
        )
        spans = None
        if endpoint := control.snapshot.config.telemetry.otlp_endpoint:
            # Only then: importing the SDK takes longer than starting without it.
            from services.observer.spans import SpanExporter

            exporter = SpanExporter(endpoint)
            stack.push_async_callback(exporter.close)
            spans = await stack.enter_async_context(ExplainedSpans(exporter.export))
        self._books = Books(control.snapshot, spans)
        answers = Answers(self._books)
        if spans is not None:
            spans.explain = answers.why
        if endpoint:
            from services.observer.otlp_metrics import OtlpMetrics

            read = self._books.families
            await stack.enter_async_context(OtlpMetrics(endpoint, member_id=self.id, read=read))
        stack.callback(self._books.close)
        control.on_config(self._books.configure)
        control.on_members(self._books.update_members)
        ticking = asyncio.create_task(self._keep_ticking(), name="observer clock")
        stack.push_async_callback(end_tasks, [ticking])
        app = make_app(self._books, answers, host=parse_listen(self._listen).host)
        page = PageServer(app, self._listen, tls=self._tls)
        await stack.enter_async_context(page)
        server = MeshServer(self._report_listen, service_names=[SERVICE_NAME], tls=self._tls)
        observer_pb2_grpc.add_ObserverServiceServicer_to_server(
            ObserverService(self._books), server.server
        )
        await stack.enter_async_context(server)
        await server.set_serving(True)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        self.address, self.report_address = page.address, server.address
        # How it is itself, it hears as it hears of all others.
        reporter = await stack.enter_async_context(
            Reporter(service="observer", member_id=self.id, tls=self._tls)
        )
        reporter.follow(control)
        control.update(
            address=self.report_address,
            http_address=self.address,
            state=control_pb2.MEMBER_STATE_READY,
        )
        # Leaving runs in reverse: say so, end the streams, then what they need.
        stack.callback(control.update, state=control_pb2.MEMBER_STATE_DRAINING)

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._books.tick()
            except Exception:  # a defect: without a clock, all that is heard would stay for ever
                logger.exception("what was heard could not be taken together")

    def _member(self) -> control_pb2.Member:
        return control_pb2.Member(
            id=self.id,
            role=control_pb2.MEMBER_ROLE_OBSERVER,
            state=control_pb2.MEMBER_STATE_STARTING,
            pid=os.getpid(),
        )

"""Answers that routers have planned. Each begins once: before its client comes for it, when a
router gives it a head start, or else when the client comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TypeAlias

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.errors import DeadlineExceeded, MeshError
from services.core.tickets import KeyRing
from services.runtime import tickets
from services.runtime.interceptor import CallMetadata, Context, MetadataPair, write
from services.runtime.protocol import LEDGER_KEY
from services.runtime.tasks import end_tasks
from services.runtime.telemetry import TRACEPARENT, TRACESTATE
from worker.plan_reports import PlanReports, PlanRun
from worker.tickets import TicketDesk

Generate: TypeAlias = Callable[
    [worker_pb2.GenerateRequest, CallMetadata], AsyncGenerator[worker_pb2.GenerateResponse]
]

logger = logging.getLogger(__name__)


class PlannedAnswer:
    """Under way from the moment that this is made. To who generates it, this is its caller."""

    def __init__(
        self,
        plan: direct_pb2.Plan,
        call: bytes,
        metadata: Iterable[MetadataPair],
        reports: PlanReports,
        generate: Generate,
    ) -> None:
        self.expiry: asyncio.TimerHandle | None = None
        self._plan = plan
        self._metadata = metadata
        self._trailing: Sequence[MetadataPair] = ()
        # Why, for programs and for people.
        self._dropped: tuple[str, str] | None = None
        self._client: asyncio.Future[Context] = asyncio.get_running_loop().create_future()
        request = worker_pb2.GenerateRequest.FromString(call)
        self.task = asyncio.create_task(
            self._answer(request, reports, generate), name="planned answer"
        )

    def invocation_metadata(self) -> Iterable[MetadataPair]:
        return self._metadata

    def set_trailing_metadata(self, trailing_metadata: Sequence[MetadataPair]) -> None:
        self._trailing = trailing_metadata

    async def give(self, client: Context) -> None:
        """All of it, once. It ends where the client leaves."""
        if not self._client.done():  # as when its time was over while it waited for this
            self._client.set_result(client)
        try:
            await self.task
        finally:
            client.set_trailing_metadata(self._trailing)

    def drop(self, reason: str, error: str) -> None:
        """Nobody comes for it."""
        self._dropped = reason, error
        if self.task.done() and not self.task.cancelled():
            failure = self.task.exception()
            if not isinstance(failure, MeshError):
                logger.error("a planned answer failed", exc_info=failure)
        self.task.cancel()

    async def _answer(
        self, request: worker_pb2.GenerateRequest, reports: PlanReports, generate: Generate
    ) -> None:
        with reports.run(self._plan) as run:
            try:
                async with asyncio.timeout(self._plan.max_duration_s) as deadline:
                    await self._write(generate(request, self), run)
            except asyncio.CancelledError:
                if self._dropped is not None:
                    run.fail(*self._dropped, None)
                raise
            except TimeoutError:
                if not deadline.expired():
                    raise
                error = DeadlineExceeded(
                    "the time that the router gave this request is over (router.max_deadline_s,"
                    " or its own deadline)",
                    reason="MAX_DEADLINE",
                )
                self._tell(error, run)
                raise error from None
            except Exception as error:
                self._tell(error, run)
                raise

    async def _write(
        self, responses: AsyncGenerator[worker_pb2.GenerateResponse], run: PlanRun
    ) -> None:
        client: Context | None = None
        async with contextlib.aclosing(responses):
            async for response in responses:
                if client is None:
                    client = await self._client
                run.note(response)
                await write(response, client)

    def _tell(self, error: Exception, run: PlanRun) -> None:
        reason = error.reason if isinstance(error, MeshError) else "INTERNAL"
        ledger = next((value for key, value in self._trailing if key == LEDGER_KEY), None)
        run.fail(
            reason,
            str(error) or reason,
            common_pb2.Ledger.FromString(ledger) if isinstance(ledger, bytes) else None,
        )


class PlannedAnswers:
    def __init__(
        self, desk: TicketDesk, reports: PlanReports, *, keys: Callable[[], KeyRing]
    ) -> None:
        self.reports = reports
        self._desk = desk
        self._keys = keys
        # Begun, and their clients are still to come.
        self._waiting: dict[bytes, PlannedAnswer] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, start: worker_pb2.HeadStart, generate: Generate) -> None:
        """Does nothing where that may not be: the client will hear why."""
        plan = self._desk.begin(self._keys(), start, time.time())
        if plan is None:
            return
        pairs = ((TRACEPARENT, start.traceparent), (TRACESTATE, start.tracestate))
        metadata = [pair for pair in pairs if pair[1]]
        answer = PlannedAnswer(plan, start.call, metadata, self.reports, generate)
        self._waiting[plan.id] = answer
        loop = asyncio.get_running_loop()
        answer.expiry = loop.call_later(
            tickets.LIFETIME_S,
            self._drop,
            plan.id,
            tickets.EXPIRED,
            "the client did not come to the worker",
        )

    async def give(
        self, request: direct_pb2.GenerateRequest, client: Context, generate: Generate
    ) -> None:
        """Raises PermissionDenied."""
        plan = self._desk.admit(self._keys(), request, time.time())
        answer = self._take(plan.id)
        if answer is None:
            metadata = client.invocation_metadata() or ()
            answer = PlannedAnswer(plan, request.call, metadata, self.reports, generate)
        await answer.give(client)

    def withdraw(self, plan_ids: Iterable[bytes]) -> None:
        """Nobody will come for these. What is on its way to a client goes on."""
        for plan_id in plan_ids:
            self._drop(plan_id, "PLAN_WITHDRAWN", "its client went another way")

    async def close(self) -> None:
        """Also the streams of who follows them, when they have said what they have to say."""
        self.withdraw([*self._waiting])
        await end_tasks(self._ending)
        self.reports.close()

    def _drop(self, plan_id: bytes, reason: str, error: str) -> None:
        if (answer := self._take(plan_id)) is not None:
            self._desk.close(plan_id)
            answer.drop(reason, error)
            if not answer.task.done():
                self._ending.add(answer.task)
                answer.task.add_done_callback(self._ending.discard)

    def _take(self, plan_id: bytes) -> PlannedAnswer | None:
        answer = self._waiting.pop(plan_id, None)
        if answer is not None and answer.expiry is not None:
            answer.expiry.cancel()
        return answer

"""What becomes of plans, told to the routers that made them.

That an answer has ended frees a slot, and is told at once; what else happens can wait a
little for company.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2

# How long what is not urgent waits for more.
COMPANY_S = 0.02
# Between two messages to one router.
SPACING_S = 0.002
# Events kept for a router that does not take them. Beyond, its stream ends: the next one
# begins with what runs.
MAX_EVENTS = 10_000
# Routers whose events are kept while they are not listening.
MAX_ABSENT = 64


class _Mailbox:
    """The events for one router."""

    def __init__(self) -> None:
        self.events: list[worker_pb2.PlanEvent] = []
        # The stream that takes them, the newest one of that router; None: there is none.
        self.listener: object | None = None
        self.is_full = False
        self._some = asyncio.Event()
        self._urgent = asyncio.Event()

    def add(self, event: worker_pb2.PlanEvent) -> None:
        if len(self.events) >= MAX_EVENTS:
            self.is_full = True
            self.events.clear()
        self.events.append(event)
        self._some.set()
        if event.HasField("ended"):
            self._urgent.set()

    def wake(self) -> None:
        self._some.set()
        self._urgent.set()

    async def some(self) -> None:
        """Until there are some, and for company."""
        await self._some.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMPANY_S):
                await self._urgent.wait()

    def take(self) -> list[worker_pb2.PlanEvent]:
        events, self.events = self.events, []
        self._some.clear()
        self._urgent.clear()
        return events


class PlanReports:
    def __init__(self) -> None:
        self._running: dict[bytes, str] = {}
        self._mailboxes: dict[str, _Mailbox] = {}
        self._closed = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @contextlib.contextmanager
    def run(self, plan: direct_pb2.Plan) -> Iterator[PlanRun]:
        """It runs for as long as the context; whatever leaves that is told."""
        self._running[plan.id] = plan.router_id
        run = PlanRun(self._mailbox(plan.router_id), plan.id)
        try:
            yield run
        finally:
            del self._running[plan.id]
            run.leave()

    def close(self) -> None:
        """End all streams, when they have said what they have to say."""
        self._closed = True
        for mailbox in self._mailboxes.values():
            mailbox.wake()

    async def follow(self, router_id: str) -> AsyncGenerator[worker_pb2.FollowPlansResponse]:
        """What a stream to this router says; ends where some of it was lost."""
        mailbox = self._mailbox(router_id)
        me = mailbox.listener = object()
        mailbox.is_full = False
        mailbox.wake()  # an older stream, which has been given up
        try:
            running = [plan for plan, router in self._running.items() if router == router_id]
            yield worker_pb2.FollowPlansResponse(
                running=worker_pb2.PlansRunning(ids=running), events=mailbox.take()
            )
            while True:
                if not self._closed:
                    await mailbox.some()
                if mailbox.listener is not me or mailbox.is_full:
                    return
                if events := mailbox.take():
                    yield worker_pb2.FollowPlansResponse(events=events)
                if self._closed:
                    return
                await asyncio.sleep(SPACING_S)
        finally:
            if mailbox.listener is me:
                mailbox.listener = None

    def _mailbox(self, router_id: str) -> _Mailbox:
        mailbox = self._mailboxes.get(router_id)
        if mailbox is None:
            absent = [name for name, box in self._mailboxes.items() if box.listener is None]
            for name in absent[: max(0, len(absent) - MAX_ABSENT)]:
                del self._mailboxes[name]
            mailbox = self._mailboxes[router_id] = _Mailbox()
        return mailbox


class PlanRun:
    """One plan, from its beginning to its end."""

    def __init__(self, mailbox: _Mailbox, plan_id: bytes) -> None:
        self._mailbox = mailbox
        self._id = plan_id
        self._has_token = False
        self._ended = worker_pb2.PlanEnded(error_reason="CANCELLED", error="the caller is gone")
        mailbox.add(worker_pb2.PlanEvent(id=plan_id, started=worker_pb2.PlanStarted()))

    def note(self, response: worker_pb2.GenerateResponse) -> None:
        """It is about to be sent."""
        if response.HasField("finished"):
            self._ended = worker_pb2.PlanEnded(finished=response.finished)
        elif not self._has_token and response.chunk.HasField("ledger"):
            self._has_token = True
            first = worker_pb2.PlanFirstToken(ledger=response.chunk.ledger)
            self._mailbox.add(worker_pb2.PlanEvent(id=self._id, first_token=first))

    def fail(self, reason: str, error: str, ledger: common_pb2.Ledger | None) -> None:
        self._ended = worker_pb2.PlanEnded(error_reason=reason, error=error, ledger=ledger)

    def leave(self) -> None:
        self._mailbox.add(worker_pb2.PlanEvent(id=self._id, ended=self._ended))

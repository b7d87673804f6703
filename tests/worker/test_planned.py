"""Answers that are planned, with a head start and without."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.errors import DeadlineExceeded, PermissionDenied, Unavailable
from services.core.tickets import derive_ring
from services.runtime import tickets
from services.runtime.interceptor import CallMetadata
from services.runtime.protocol import LEDGER_KEY
from services.runtime.telemetry import TRACEPARENT
from tests.runtime.waiting import eventually
from worker.plan_reports import PlanReports
from worker.planned import PlannedAnswers
from worker.tickets import TicketDesk

RING = derive_ring(b"secret", time.time(), 3600.0)
NUM_CHUNKS = 3
ids = itertools.count(1)


class Engine:
    """Generates what the requests of these tests ask for."""

    def __init__(self) -> None:
        self.num_begun = self.num_left = 0
        self.callers: list[CallMetadata] = []
        self.failure: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(
        self, request: worker_pb2.GenerateRequest, call: CallMetadata
    ) -> AsyncGenerator[worker_pb2.GenerateResponse]:
        self.num_begun += 1
        self.callers.append(call)
        try:
            await self.hold.wait()
            if self.failure is not None:
                call.set_trailing_metadata([(LEDGER_KEY, b"\x51" + b"\0" * 8)])
                raise self.failure
            for number in range(NUM_CHUNKS):
                chunk = common_pb2.Chunk(text=f"{request.tenant} {number}")
                yield worker_pb2.GenerateResponse(chunk=chunk)
            yield worker_pb2.GenerateResponse(finished=common_pb2.Finished())
        finally:
            self.num_left += 1


class Client:
    """What an answer is written to."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.trailing: Any = ()

    async def write(self, response: worker_pb2.GenerateResponse) -> None:
        await asyncio.sleep(0)
        self.texts.append("finished" if response.HasField("finished") else response.chunk.text)

    def invocation_metadata(self) -> Any:
        return ((TRACEPARENT, "the client's"),)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = trailing_metadata


class Desk:
    """The answers of one worker, and what its router hears of them."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.answers = PlannedAnswers(TicketDesk("here"), PlanReports(), keys=lambda: RING)
        self.heard: list[str] = []

    def begin(self, planned: direct_pb2.GenerateRequest) -> None:
        start = worker_pb2.HeadStart(
            call=planned.call, ticket=planned.ticket, traceparent="the router's"
        )
        self.answers.begin(start, self.engine.generate)

    async def fetch(self, planned: direct_pb2.GenerateRequest) -> list[str]:
        client: Any = Client()
        await self.answers.give(planned, client, self.engine.generate)
        texts: list[str] = client.texts
        return texts

    async def listen(self) -> None:
        async with aclosing(self.answers.reports.follow("router")) as messages:
            async for message in messages:
                self.heard += [
                    event.ended.error_reason or "answered"
                    for event in message.events
                    if event.HasField("ended")
                ]


@asynccontextmanager
async def run_desk() -> AsyncIterator[Desk]:
    desk = Desk()
    listening = asyncio.create_task(desk.listen())
    yield desk
    await desk.answers.close()
    await listening
    assert desk.answers.num_waiting == 0
    assert desk.engine.num_left == desk.engine.num_begun


def plan(*, max_duration_s: float = 60.0) -> direct_pb2.GenerateRequest:
    call = worker_pb2.GenerateRequest(tenant="me").SerializeToString()
    planned = direct_pb2.Plan(
        id=next(ids).to_bytes(tickets.PLAN_ID_BYTES, "big"),
        router_id="router",
        worker_id="here",
        call_digest=tickets.digest(call),
        expires_s=time.time() + tickets.LIFETIME_S,
        max_duration_s=max_duration_s,
    )
    return direct_pb2.GenerateRequest(call=call, ticket=tickets.issue(RING, planned))


ANSWER = ["me 0", "me 1", "me 2", "finished"]


async def test_who_comes_later_gets_the_answer_from_its_beginning() -> None:
    async with run_desk() as desk:
        planned = plan()
        desk.begin(planned)
        await eventually(lambda: desk.engine.num_begun == 1)
        assert await desk.fetch(planned) == ANSWER
        await eventually(lambda: desk.heard == ["answered"])
        assert desk.engine.num_begun == 1
        [caller] = desk.engine.callers
        assert list(caller.invocation_metadata() or ()) == [(TRACEPARENT, "the router's")]


async def test_who_comes_first_is_not_answered_twice() -> None:
    async with run_desk() as desk:
        planned = plan()
        assert await desk.fetch(planned) == ANSWER
        desk.begin(planned)
        assert (desk.answers.num_waiting, desk.engine.num_begun) == (0, 1)


async def test_an_answer_is_for_one_client() -> None:
    async with run_desk() as desk:
        planned = plan()
        desk.begin(planned)
        desk.begin(planned)
        assert await desk.fetch(planned) == ANSWER
        with pytest.raises(PermissionDenied, match="used before"):
            await desk.fetch(planned)
        assert desk.engine.num_begun == 1


async def test_a_forged_head_start_does_nothing() -> None:
    async with run_desk() as desk:
        planned = plan()
        planned.call += b"\x08\x01"
        desk.begin(planned)
        assert (desk.answers.num_waiting, desk.engine.num_begun) == (0, 0)


async def test_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_desk() as desk:
        planned = plan()
        monkeypatch.setattr(tickets, "LIFETIME_S", 0.02)
        desk.begin(planned)
        await eventually(lambda: desk.heard == [tickets.EXPIRED])
        assert desk.engine.num_left == 1
        with pytest.raises(PermissionDenied):
            await desk.fetch(planned)


async def test_a_client_goes_another_way() -> None:
    async with run_desk() as desk:
        kept, left = plan(), plan()
        for planned in (kept, left):
            desk.begin(planned)
        [_, plan_id] = desk.answers._waiting
        await eventually(lambda: desk.engine.num_begun == 2)
        desk.answers.withdraw([plan_id, b"unheard of"])
        await eventually(lambda: desk.heard == ["PLAN_WITHDRAWN"])
        assert desk.engine.num_left == 1
        assert await desk.fetch(kept) == ANSWER


async def test_a_client_that_has_come_keeps_its_answer() -> None:
    async with run_desk() as desk:
        planned = plan()
        desk.engine.hold.clear()
        desk.begin(planned)
        [plan_id] = desk.answers._waiting
        fetching = asyncio.create_task(desk.fetch(planned))
        await eventually(lambda: desk.answers.num_waiting == 0)
        desk.answers.withdraw([plan_id])
        desk.engine.hold.set()
        assert await fetching == ANSWER


@pytest.mark.parametrize("is_early", [True, False])
async def test_why_there_is_no_answer_is_told_with_the_ledger(is_early: bool) -> None:
    async with run_desk() as desk:
        desk.engine.failure = Unavailable("the engine core died", reason="ENGINE_DIED")
        planned, client = plan(), Client()
        if is_early:
            desk.begin(planned)
            await eventually(lambda: desk.heard == ["ENGINE_DIED"])
        given: Any = client
        with pytest.raises(Unavailable, match="core died"):
            await desk.answers.give(planned, given, desk.engine.generate)
        assert [key for key, _ in client.trailing] == [LEDGER_KEY]
        await eventually(lambda: desk.heard == ["ENGINE_DIED"])


async def test_its_time_may_be_over_before_the_client_comes() -> None:
    async with run_desk() as desk:
        planned = plan(max_duration_s=0.01)
        desk.begin(planned)
        await eventually(lambda: desk.heard == ["MAX_DEADLINE"])
        with pytest.raises(DeadlineExceeded, match="time that the router gave"):
            await desk.fetch(planned)


async def test_a_client_that_leaves_ends_it() -> None:
    async with run_desk() as desk:
        planned = plan()
        desk.engine.hold.clear()
        desk.begin(planned)
        fetching = asyncio.create_task(desk.fetch(planned))
        await eventually(lambda: desk.engine.num_begun == 1 and not desk.answers.num_waiting)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await eventually(lambda: desk.heard == ["CANCELLED"])


async def test_closing_ends_what_nobody_has_come_for() -> None:
    async with run_desk() as desk:
        desk.engine.hold.clear()
        for _ in range(3):
            desk.begin(plan())
        await eventually(lambda: desk.engine.num_begun == 3)
    assert desk.heard == ["PLAN_WITHDRAWN"] * 3

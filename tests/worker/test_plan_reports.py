from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from worker import plan_reports
from worker.plan_reports import PlanReports, PlanRun

Stream = AsyncGenerator[worker_pb2.FollowPlansResponse]


def plan(number: int, router_id: str = "router-1") -> direct_pb2.Plan:
    return direct_pb2.Plan(id=bytes([number]) * 16, router_id=router_id)


def answer(run: PlanRun) -> None:
    chunk = common_pb2.Chunk(token_ids=b"1234", ledger=common_pb2.Ledger(total_ms=5.0))
    run.note(worker_pb2.GenerateResponse(chunk=chunk))
    run.note(worker_pb2.GenerateResponse(chunk=common_pb2.Chunk(token_ids=b"1234")))
    run.note(worker_pb2.GenerateResponse(finished=common_pb2.Finished(worker_id="me")))


async def told(stream: Stream, num_events: int) -> list[str]:
    """Number of the plan and what has become of it."""
    events: list[worker_pb2.PlanEvent] = []
    async with asyncio.timeout(10):
        while len(events) < num_events:
            events += (await anext(stream)).events
    return [f"{event.id[0]} {event.WhichOneof('event')}" for event in events]


async def running(stream: Stream) -> list[int]:
    """What the first message says."""
    first = await anext(stream)
    assert first.HasField("running")
    return [id[0] for id in first.running.ids]


async def test_a_router_hears_of_its_own_plans() -> None:
    reports = PlanReports()
    async with aclosing(reports.follow("router-1")) as one, aclosing(reports.follow("2")) as two:
        assert await running(one) == await running(two) == []
        with reports.run(plan(1)) as run, reports.run(plan(2, "2")):
            assert reports.num_running == 2
            answer(run)
        assert await told(one, 3) == ["1 started", "1 first_token", "1 ended"]
        assert await told(two, 2) == ["2 started", "2 ended"]
    assert reports.num_running == 0


async def test_whatever_ends_a_plan_is_told() -> None:
    reports = PlanReports()
    with reports.run(plan(1)) as run:
        answer(run)
    with reports.run(plan(2)) as run:
        run.fail("OVERLOADED", "too much", common_pb2.Ledger(total_ms=7.0))
    with pytest.raises(asyncio.CancelledError), reports.run(plan(3)):
        raise asyncio.CancelledError
    async with aclosing(reports.follow("router-1")) as stream:
        events = (await anext(stream)).events
    ended = [event.ended for event in events if event.HasField("ended")]
    assert ended[0].finished.worker_id == "me"
    assert (ended[1].error_reason, ended[1].ledger.total_ms) == ("OVERLOADED", 7.0)
    assert ended[2].error_reason == "CANCELLED"


async def test_a_stream_begins_with_what_runs() -> None:
    reports = PlanReports()
    with reports.run(plan(1)), reports.run(plan(2)), reports.run(plan(3, "another")):
        async with aclosing(reports.follow("router-1")) as stream:
            assert await running(stream) == [1, 2]


async def test_a_newer_stream_of_the_same_router_takes_over() -> None:
    reports = PlanReports()
    async with aclosing(reports.follow("router-1")) as old:
        assert await running(old) == []
        async with aclosing(reports.follow("router-1")) as new:
            assert await running(new) == []
            with reports.run(plan(1)):
                pass
            with pytest.raises(StopAsyncIteration):
                await anext(old)
            assert await told(new, 2) == ["1 started", "1 ended"]


async def test_who_falls_too_far_behind_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_reports, "MAX_EVENTS", 4)
    reports = PlanReports()
    async with aclosing(reports.follow("router-1")) as stream:
        assert await running(stream) == []
        for number in range(3):
            with reports.run(plan(number)):
                pass
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    async with aclosing(reports.follow("router-1")) as stream:
        assert await running(stream) == []


async def test_routers_that_are_gone_are_forgotten() -> None:
    reports = PlanReports()
    for number in range(3 * plan_reports.MAX_ABSENT):
        with reports.run(plan(1, f"router-{number}")):
            pass
        if number < plan_reports.MAX_ABSENT:
            assert len(reports._mailboxes) == number + 1
    assert len(reports._mailboxes) <= plan_reports.MAX_ABSENT + 1


async def test_closing_ends_the_streams_once_they_have_told_all() -> None:
    reports = PlanReports()
    async with aclosing(reports.follow("router-1")) as stream:
        assert await running(stream) == []
        with reports.run(plan(1)):
            pass
        reports.close()
        assert await told(stream, 2) == ["1 started", "1 ended"]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

"""What a process tells the observer, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from firsttoken.control.v1 import control_pb2
from firsttoken.observer.v1 import observer_pb2, observer_pb2_grpc
from services.control.node import ControlNode
from services.core.ledger import Ledger, Segment
from services.core.metrics import Metric, Sample
from services.core.settings import MeshConfig
from services.observer import requests
from services.observer.model import Request
from services.observer.node import ObserverNode
from services.runtime import reporter as reporter_module
from services.runtime.pending import BATCH_HOPS, MAX_BATCHES
from services.runtime.reporter import Reporter
from services.runtime.server import Context, MeshServer
from services.runtime.telemetry import TraceContext
from tests.runtime.waiting import eventually

OBSERVER = control_pb2.Member(
    id="observer-1",
    role=control_pb2.MEMBER_ROLE_OBSERVER,
    state=control_pb2.MEMBER_STATE_READY,
    address="127.0.0.1:1",
)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "GRACE_S", 0.05)
    monkeypatch.setattr(reporter_module, "INTERVAL_S", 0.1)


class Pair(NamedTuple):
    reporter: Reporter
    observer: ObserverNode

    @property
    def requests(self) -> list[Request]:
        return list(self.observer.books.requests)


@asynccontextmanager
async def observed() -> AsyncIterator[Pair]:
    async with (
        ControlNode(config=MeshConfig()) as control,
        ObserverNode(control=control.address) as observer,
        make_reporter() as reporter,
    ):
        reporter.update_members([member_of(observer)])
        yield Pair(reporter, observer)


def make_reporter() -> Reporter:
    return Reporter(service="router", member_id="router-1")


def member_of(observer: ObserverNode) -> control_pb2.Member:
    member = control_pb2.Member()
    member.CopyFrom(OBSERVER)
    member.address = observer.report_address
    return member


def record(reporter: Reporter, **attributes: object) -> str:
    """The trace id of a request that is over."""
    context = TraceContext.new().child(sampled=True)
    ledger = Ledger(time.monotonic())
    ledger.record(Segment.QUEUE, ledger.arrived_s, ledger.arrived_s + 0.25)
    ledger.mark_first_token(ledger.arrived_s + 0.5)
    reporter.record_request("router.generate", context, "", ledger, attributes)
    return context.trace_id


async def test_a_request_is_told_with_who_tells_it() -> None:
    async with observed() as pair:
        trace_id = record(pair.reporter, **{"firsttoken.tenant": "acme"})
        await eventually(lambda: pair.requests)
        [request] = pair.requests

    [hop] = request.hops
    assert (request.trace_id, request.tenant) == (trace_id, "acme")
    assert (hop.service, hop.member_id) == ("router", "router-1")
    assert request.spent_s == {Segment.QUEUE: pytest.approx(0.25)}
    assert request.ttft_s == pytest.approx(0.5)
    assert request.residual_s == pytest.approx(0.25)


async def test_what_cannot_be_told_is_dropped_and_the_rest_told() -> None:
    async with observed() as pair:
        record(pair.reporter, name="\ud800")
        trace_id = record(pair.reporter, name="b")
        await eventually(lambda: pair.requests)

        assert [request.trace_id for request in pair.requests] == [trace_id]
        assert pair.reporter.num_dropped == 1
        await eventually(lambda: pair.observer.books.num_dropped == 1)


async def test_bubbles_are_summed_and_samples_told_by_themselves() -> None:
    metric = Metric("firsttoken.test.level", "{thing}", "Things.", False)
    async with observed() as pair:
        books = pair.observer.books
        pair.reporter.watch([metric], lambda: [Sample(metric.name, 7, (("kind", "a"),))])
        pair.reporter.bubble("queue", 0.5)
        pair.reporter.bubble("queue", 0.25)
        await eventually(lambda: any(each.name == metric.name for each in books.readings))
        await eventually(lambda: list(books.bubbles))

    [bubble] = books.bubbles
    reading = next(each for each in books.readings if each.name == metric.name)
    assert (bubble.worker_id, bubble.stage, bubble.duration_s) == ("router-1", "queue", 0.75)
    assert (reading.value, reading.labels) == (7.0, (("kind", "a"),))


async def test_what_is_recorded_last_is_told_before_it_closes() -> None:
    async with observed() as pair:
        await eventually(lambda: not pair.requests)
        record(pair.reporter)
        await pair.reporter.close()
        await pair.reporter.close()
        pair.observer.books.close()

        assert len(pair.requests) == 1


async def test_until_there_is_an_observer_nothing_is_kept() -> None:
    async with make_reporter() as reporter:
        record(reporter)
        assert not reporter.enabled
        reporter.update_members([OBSERVER])
        assert reporter.enabled


async def test_with_an_observer_that_is_gone_the_oldest_is_dropped_and_counted() -> None:
    async with make_reporter() as reporter:
        reporter.update_members([OBSERVER])
        for _ in range(BATCH_HOPS * (MAX_BATCHES + 1)):
            record(reporter)

        assert reporter.num_dropped == BATCH_HOPS


async def test_it_goes_on_with_an_observer_that_comes_back() -> None:
    async with ControlNode(config=MeshConfig()) as control, make_reporter() as reporter:
        async with ObserverNode(control=control.address) as first:
            reporter.update_members([member_of(first)])
            record(reporter)
            await eventually(lambda: len(first.books.requests) == 1)
        reporter.update_members([])
        record(reporter)
        async with ObserverNode(control=control.address) as second:
            reporter.update_members([member_of(second)])
            await eventually(lambda: len(second.books.requests) == 1)


class Deaf(observer_pb2_grpc.ObserverServiceServicer):
    """It takes the call, and nothing more."""

    async def Report(self, requests: object, context: Context) -> observer_pb2.ReportResponse:
        await asyncio.Event().wait()
        raise AssertionError


async def test_an_observer_that_does_not_listen_holds_nobody_up() -> None:
    server = MeshServer("127.0.0.1:0", service_names=[])
    observer_pb2_grpc.add_ObserverServiceServicer_to_server(Deaf(), server.server)
    async with server:
        member = control_pb2.Member()
        member.CopyFrom(OBSERVER)
        member.address = server.address
        async with make_reporter() as reporter:
            reporter.update_members([member])
            for _ in range(2000):
                record(reporter, text="x" * 1000)
            await asyncio.sleep(0.5)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 20
        await server.stop(grace_s=0)


def test_every_process_chooses_the_same_of_several() -> None:
    members = []
    for number in (2, 1, 3):
        member = control_pb2.Member()
        member.CopyFrom(OBSERVER)
        member.id, member.address = f"observer-{number}", f"127.0.0.1:{number}"
        members.append(member)
    members[1].state = control_pb2.MEMBER_STATE_STARTING

    async def chosen(order: list[control_pb2.Member]) -> str:
        reporter = make_reporter()
        reporter.update_members(order)
        return reporter._address

    assert asyncio.run(chosen(members)) == "127.0.0.1:2"
    assert asyncio.run(chosen(members[::-1])) == "127.0.0.1:2"


def test_an_open_decision_is_the_same_in_every_process() -> None:
    async def decide() -> None:
        one, other = make_reporter(), Reporter(service="worker", member_id="worker-1")
        traces = [TraceContext.new() for _ in range(2000)]
        sampled = [one.decide(trace, 0.25) for trace in traces]

        assert sampled == [other.decide(trace, 0.25) for trace in traces]
        assert 350 < sum(sampled) < 650
        assert not any(one.decide(trace, 0.0) for trace in traces)
        assert all(one.decide(trace, 1.0) for trace in traces)
        assert one.decide(traces[0]._replace(sampled=True), 0.0) is True
        assert one.decide(traces[0]._replace(sampled=False), 1.0) is False

    asyncio.run(decide())

"""Spans as a real collector gets them."""

from __future__ import annotations

import logging
import time

import pytest

from services.core.ledger import Segment
from services.observer import spans
from services.observer.model import Part
from services.observer.spans import SpanExporter
from tests.observer.made import a_hop
from tests.runtime.collector import attributes_of, collecting
from tests.runtime.waiting import eventually

DEAD = "http://127.0.0.1:1"
TRACE_ID, SPAN_ID, PARENT = (
    "0af7651916cd43dd8448eb211c80319c",
    "b7ad6b7169203331",
    "00f067aa0ba902b7",
)
PARTS = (Part(Segment.QUEUE, 0.0, 0.25), Part(Segment.ROUTE, 0.25, 0.5))
HOP = a_hop(
    trace_id=TRACE_ID,
    span_id=SPAN_ID,
    parent_span_id=PARENT,
    tracestate="a=1",
    ended_s=1.0,
    first_token_s=0.75,
    parts=PARTS,
    hidden_s={"prefetch": 0.125},
    attributes={"gen_ai.request.model": "m", "firsttoken.usage.cached_tokens": 3},
)


# First of those that export: the exporter does not say the same twice within 20 s.
async def test_a_collector_that_answers_leaves_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with collecting() as collector:
        exporter = SpanExporter(collector.endpoint)
        exporter.export(HOP)
        await exporter.close()

        assert len(collector.by_name) == 3
    assert caplog.messages == []


async def test_a_hop_becomes_a_span_with_a_child_for_each_interval() -> None:
    async with collecting() as collector:
        exporter = SpanExporter(collector.endpoint)
        exporter.export(HOP)
        await exporter.close()
        found = collector.by_name
        (resource,) = collector.received

    request, queue, route = found["router.generate"], found["queue"], found["route"]
    start_ns = request.start_time_unix_nano
    identity = {"service.name": "router", "service.instance.id": "router-1"}
    assert sorted(found) == ["queue", "route", "router.generate"]
    assert {span.trace_id.hex() for span in found.values()} == {TRACE_ID}
    assert (request.span_id.hex(), request.parent_span_id.hex()) == (SPAN_ID, PARENT)
    assert request.trace_state == "a=1"
    assert {queue.parent_span_id, route.parent_span_id} == {request.span_id}
    assert len({request.span_id, queue.span_id, route.span_id}) == 3
    assert start_ns == pytest.approx(HOP.arrived_unix_s * 1e9, abs=2000)
    for span, start_s, end_s in ((request, 0, 1), (queue, 0, 0.25), (route, 0.25, 0.5)):
        assert span.start_time_unix_nano - start_ns == pytest.approx(start_s * 1e9, abs=2000)
        assert span.end_time_unix_nano - start_ns == pytest.approx(end_s * 1e9, abs=2000)
    (event,) = request.events
    assert event.name == "first_token"
    assert event.time_unix_nano - start_ns == pytest.approx(0.75e9, abs=2000)
    assert request.status.code == request.status.STATUS_CODE_UNSET
    assert attributes_of(resource.resource) == identity
    assert attributes_of(queue) == identity
    assert attributes_of(request) == {
        **identity,
        "gen_ai.request.model": "m",
        "firsttoken.usage.cached_tokens": 3,
        "firsttoken.hidden.prefetch": 125.0,
    }


async def test_an_error_and_a_trace_that_begins_here_are_shown_as_such() -> None:
    async with collecting() as collector:
        exporter = SpanExporter(collector.endpoint)
        exporter.export(a_hop(error="no worker", first_token_s=None, sampled=False))
        await exporter.close()
        span = collector.by_name["router.generate"]

    assert span.parent_span_id == b""
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert span.status.message == "no worker"
    assert list(span.events) == []


async def test_each_process_is_a_resource_of_its_own() -> None:
    async with collecting() as collector:
        exporter = SpanExporter(collector.endpoint)
        for number in range(3):
            exporter.export(a_hop(service="worker", member_id=f"worker-{number}"))
        await exporter.close()
        found = {
            str(attributes_of(each.resource)["service.instance.id"]) for each in collector.received
        }

    assert found == {"worker-0", "worker-1", "worker-2"}


async def test_spans_are_exported_while_it_runs() -> None:
    async with collecting() as collector:
        exporter = SpanExporter(collector.endpoint)
        exporter.export(HOP)
        await eventually(lambda: len(collector.by_name) == 3)
        await exporter.close()


async def test_a_malformed_state_is_not_exported(caplog: pytest.LogCaptureFixture) -> None:
    async with collecting() as collector:
        exporter = SpanExporter(collector.endpoint)
        exporter.export(a_hop(tracestate="no key here"))
        await exporter.close()
        span = collector.by_name["router.generate"]

    assert span.trace_state == ""
    assert caplog.text == ""


async def test_a_dead_collector_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "EXPORT_INTERVAL_S", 0.01)
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(spans, "MAX_QUEUED_SPANS", 1024)
    exporter = SpanExporter(DEAD)
    for _ in range(1000):  # three spans each: more than the queue takes
        exporter.export(HOP)
    await eventually(lambda: "telemetry is dropped" in caplog.text)
    await exporter.close()

    assert [record.getMessage() for record in caplog.records] == [
        f"telemetry is dropped: the collector at {DEAD} does not take it"
    ]


async def test_a_collector_that_does_not_answer_cannot_hold_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spans, "EXPORT_TIMEOUT_S", 600.0)
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.1)
    async with collecting() as collector:
        collector.silent = True
        exporter = SpanExporter(collector.endpoint)
        exporter.export(HOP)
        began_s = time.monotonic()
        await exporter.close()

        assert time.monotonic() - began_s < 30


async def test_closing_leaves_the_exporter_s_log_as_it_was() -> None:
    names = spans._EXPORTER_LOGGERS
    before = [list(logging.getLogger(name).filters) for name in names]
    await SpanExporter(DEAD).close()

    assert [list(logging.getLogger(name).filters) for name in names] == before

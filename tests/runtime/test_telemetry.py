from __future__ import annotations

import contextlib
import logging
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ledger import Ledger, Segment
from services.runtime import spans
from services.runtime.status import MAX_MESSAGE_BYTES
from services.runtime.telemetry import Attributes, TraceContext, Tracing
from tests.runtime.collector import attributes_of, collecting
from tests.runtime.waiting import eventually

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
DEAD = "http://127.0.0.1:1"


def make_ledger(arrived_s: float) -> Ledger:
    ledger = Ledger(arrived_s)
    ledger.record(Segment.QUEUE, arrived_s, arrived_s + 0.25)
    ledger.record(Segment.ROUTE, arrived_s + 0.25, arrived_s + 0.5)
    ledger.mark_first_token(arrived_s + 0.75)
    return ledger


def test_the_caller_s_context_is_taken() -> None:
    context = TraceContext.from_metadata([("a", "b"), ("traceparent", TRACEPARENT)])

    assert context == (TRACE_ID, SPAN_ID, True, "")
    assert TraceContext.from_metadata([("traceparent", TRACEPARENT[:-1] + "0")]).sampled is False
    assert TraceContext.from_metadata([("traceparent", TRACEPARENT[:-2] + "03")]).sampled is True


def test_what_goes_in_comes_out_for_the_next_hop() -> None:
    metadata = [("traceparent", TRACEPARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]
    child = TraceContext.from_metadata(metadata).child()
    sent = dict(child.metadata())

    assert sent["tracestate"] == "a=1,b=2"
    assert sent["traceparent"] == f"00-{TRACE_ID}-{child.span_id}-01"
    assert child.span_id != SPAN_ID


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "rubbish",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
    ],
)
def test_a_malformed_context_begins_a_new_trace(traceparent: str) -> None:
    context = TraceContext.from_metadata([("traceparent", traceparent)])

    assert re.fullmatch("[0-9a-f]{32}", context.trace_id)
    assert context.trace_id != TRACE_ID
    assert (context.span_id, context.sampled) == ("", None)


def test_no_context_at_all_begins_a_new_trace() -> None:
    assert TraceContext.from_metadata(None).sampled is None
    assert TraceContext.from_metadata([]) != TraceContext.from_metadata([])


def test_two_contexts_are_none() -> None:
    metadata = [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)]

    assert TraceContext.from_metadata(metadata).trace_id != TRACE_ID


def test_a_later_version_may_say_more() -> None:
    later = f"01-{TRACE_ID}-{SPAN_ID}-01-more"

    assert TraceContext.from_metadata([("traceparent", later)]).trace_id == TRACE_ID


def test_a_state_that_is_too_long_is_dropped() -> None:
    metadata = [("traceparent", TRACEPARENT), ("tracestate", "a=" + "x" * 600)]

    assert TraceContext.from_metadata(metadata).tracestate == ""


@given(value=st.text() | st.binary())
def test_any_metadata_gives_a_context(value: str | bytes) -> None:
    context = TraceContext.from_metadata([("traceparent", value), ("tracestate", value)])

    assert re.fullmatch("[0-9a-f]{32}", context.trace_id)


def test_a_child_keeps_a_decision_and_settles_an_open_one() -> None:
    taken = TraceContext(TRACE_ID, SPAN_ID, True)

    assert taken.child(sampled=False).sampled is True
    assert TraceContext.new().child(sampled=True).sampled is True
    assert TraceContext.new().child().metadata()[0][1].endswith("-00")


def test_an_open_decision_is_the_same_in_every_process() -> None:
    one = Tracing("", service="one", member_id="1")
    other = Tracing("", service="other", member_id="2")
    traces = [TraceContext.new() for _ in range(2000)]
    sampled = [one.decide(trace, 0.25) for trace in traces]

    assert sampled == [other.decide(trace, 0.25) for trace in traces]
    assert 350 < sum(sampled) < 650
    assert not any(one.decide(trace, 0.0) for trace in traces)
    assert all(one.decide(trace, 1.0) for trace in traces)


def test_the_caller_s_decision_stands() -> None:
    tracing = Tracing("", service="s", member_id="1")

    assert tracing.decide(TraceContext(TRACE_ID, SPAN_ID, True), 0.0) is True
    assert tracing.decide(TraceContext(TRACE_ID, SPAN_ID, False), 1.0) is False


# First of those that export: the exporter does not say the same twice within 20 s.
async def test_a_collector_that_answers_leaves_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with collecting() as collector:
        async with Tracing(collector.endpoint, service="router", member_id="r1") as tracing:
            context = TraceContext.new().child(sampled=True)
            tracing.record_request("generate", context, "", make_ledger(time.monotonic()), {})

        assert len(collector.by_name) == 3
    assert caplog.messages == []


async def test_a_request_becomes_a_span_with_a_child_for_each_interval() -> None:
    context = TraceContext(TRACE_ID, SPAN_ID, True, "a=1").child()
    async with collecting() as collector:
        async with Tracing(collector.endpoint, service="router", member_id="r1") as tracing:
            before_ns = time.time_ns()
            arrived_s = time.monotonic()
            ledger = make_ledger(arrived_s)
            attributes: Attributes = {"gen_ai.request.model": "m", "firsttoken.cached_tokens": 3}
            tracing.record_request(
                "generate", context, SPAN_ID, ledger, attributes, end_s=arrived_s + 1.0
            )
        found = collector.by_name
        (resource,) = collector.received

    request, queue, route = found["generate"], found["queue"], found["route"]
    start_ns = request.start_time_unix_nano
    assert sorted(found) == ["generate", "queue", "route"]
    assert {span.trace_id.hex() for span in found.values()} == {TRACE_ID}
    assert (request.span_id.hex(), request.parent_span_id.hex()) == (context.span_id, SPAN_ID)
    assert request.trace_state == "a=1"
    assert {queue.parent_span_id, route.parent_span_id} == {request.span_id}
    assert len({request.span_id, queue.span_id, route.span_id}) == 3
    assert abs(start_ns - before_ns) < 5_000_000_000
    for span, start_s, end_s in ((request, 0, 1), (queue, 0, 0.25), (route, 0.25, 0.5)):
        assert span.start_time_unix_nano - start_ns == pytest.approx(start_s * 1e9, abs=2000)
        assert span.end_time_unix_nano - start_ns == pytest.approx(end_s * 1e9, abs=2000)
    (event,) = request.events
    assert event.name == "first_token"
    assert event.time_unix_nano - start_ns == pytest.approx(0.75e9, abs=2000)
    assert request.status.code == request.status.STATUS_CODE_UNSET
    assert attributes_of(resource.resource) == {
        "service.name": "router",
        "service.instance.id": "r1",
    }
    assert attributes_of(request) == {
        "service.name": "router",
        "service.instance.id": "r1",
        "gen_ai.request.model": "m",
        "firsttoken.cached_tokens": 3,
    }


async def test_an_error_and_a_trace_that_begins_here_are_shown_as_such() -> None:
    context = TraceContext.new().child(sampled=True)
    async with collecting() as collector:
        async with Tracing(collector.endpoint, service="router", member_id="r1") as tracing:
            ledger = Ledger(time.monotonic())
            tracing.record_request("generate", context, "", ledger, {}, error="no worker")
        span = collector.by_name["generate"]

    assert span.parent_span_id == b""
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert span.status.message == "no worker"
    assert list(span.events) == []


async def test_an_error_is_as_long_as_in_the_answer_at_most() -> None:
    context = TraceContext.new().child(sampled=True)
    async with collecting() as collector:
        async with Tracing(collector.endpoint, service="router", member_id="r1") as tracing:
            ledger = Ledger(time.monotonic())
            tracing.record_request("generate", context, "", ledger, {}, error="x" * 10_000_000)
        span = collector.by_name["generate"]

    assert span.status.message == "x" * (MAX_MESSAGE_BYTES - 3) + "..."


async def test_spans_are_exported_while_it_runs() -> None:
    async with contextlib.AsyncExitStack() as stack:
        collector = await stack.enter_async_context(collecting())
        tracing = Tracing(collector.endpoint, service="router", member_id="r1")
        await stack.enter_async_context(tracing)
        context = TraceContext.new().child(sampled=True)
        tracing.record_request("generate", context, "", make_ledger(time.monotonic()), {})
        await eventually(lambda: len(collector.by_name) == 3)


@pytest.mark.parametrize("sampled", [False, None])
async def test_what_is_not_sampled_is_not_exported(sampled: bool | None) -> None:
    context = TraceContext(TRACE_ID, SPAN_ID, sampled)
    async with collecting() as collector:
        async with Tracing(collector.endpoint, service="router", member_id="r1") as tracing:
            tracing.record_request("generate", context, "", make_ledger(0.0), {})

        assert collector.received == []


async def test_a_malformed_state_is_passed_on_but_not_exported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = TraceContext(TRACE_ID, SPAN_ID, True, "no key here").child()
    async with collecting() as collector:
        async with Tracing(collector.endpoint, service="router", member_id="r1") as tracing:
            tracing.record_request("generate", context, SPAN_ID, Ledger(time.monotonic()), {})
        span = collector.by_name["generate"]

    assert dict(context.metadata())["tracestate"] == "no key here"
    assert span.trace_state == ""
    assert caplog.text == ""


async def test_with_no_endpoint_it_does_nothing() -> None:
    async with Tracing("", service="router", member_id="r1") as tracing:
        context = TraceContext.new().child(sampled=True)
        tracing.record_request("generate", context, "", make_ledger(0.0), {})

        assert not tracing.enabled


async def test_a_dead_collector_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "EXPORT_INTERVAL_S", 0.01)
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.2)
    async with Tracing(DEAD, service="router", member_id="r1") as tracing:
        context = TraceContext.new().child(sampled=True)
        for _ in range(5000):  # three spans each: more than the queue takes
            tracing.record_request("generate", context, "", make_ledger(time.monotonic()), {})
        await eventually(lambda: "telemetry is dropped" in caplog.text)

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
        started_s = time.monotonic()
        async with Tracing(collector.endpoint, service="router", member_id="r1") as tracing:
            context = TraceContext.new().child(sampled=True)
            tracing.record_request("generate", context, "", make_ledger(time.monotonic()), {})

        assert time.monotonic() - started_s < 30


async def test_closing_twice_leaves_the_exporter_s_log_as_it_was() -> None:
    names = spans._EXPORTER_LOGGERS
    before = [list(logging.getLogger(name).filters) for name in names]
    async with Tracing(DEAD, service="router", member_id="r1") as tracing:
        await tracing.close()

    assert [list(logging.getLogger(name).filters) for name in names] == before

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.telemetry import TraceContext

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


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

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ledger import Ledger, Segment
from services.runtime import hops
from services.runtime.status import MAX_MESSAGE_BYTES
from services.runtime.telemetry import TraceContext

CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True, "a=1")
VALUES = st.text(st.characters(codec="utf-8")) | st.booleans() | st.integers(-(2**53), 2**53)


def told(ledger: Ledger, **changes: object) -> hops.Told:
    given = hops.Told("router.generate", CONTEXT, "00f067aa0ba902b7", ledger, {}, "", 12.0)
    return given._replace(**changes)  # type: ignore[arg-type]


@given(attributes=st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES))
def test_what_is_encoded_comes_back(attributes: dict[str, object]) -> None:
    ledger = Ledger(10.0)
    ledger.record(Segment.QUEUE, 10.5, 11.0)
    ledger.spend(Segment.TRANSFER, 0.25)
    ledger.hidden_s["prefetch"] = 0.125
    ledger.mark_first_token(11.5)

    [hop] = hops.decode(hops.encode([told(ledger, attributes=attributes)], 5_000_000_000))

    assert hop == hops.Hop(
        name="router.generate",
        trace_id=CONTEXT.trace_id,
        span_id=CONTEXT.span_id,
        parent_span_id="00f067aa0ba902b7",
        tracestate="a=1",
        sampled=True,
        arrived_unix_ns=15_000_000_000,
        ended_s=2.0,
        first_token_s=1.5,
        parts=[["queue", 0.5, 1.0]],  # type: ignore[list-item]
        spent_s=[["queue", 0.5], ["transfer", 0.25]],  # type: ignore[list-item]
        hidden_s=[["prefetch", 0.125]],  # type: ignore[list-item]
        error="",
        attributes=attributes,
    )


def test_a_first_token_that_never_came_is_none() -> None:
    [hop] = hops.decode(hops.encode([told(Ledger(10.0))], 0))

    assert hop.first_token_s is None


def test_an_error_is_as_long_as_in_the_answer_at_most() -> None:
    [hop] = hops.decode(hops.encode([told(Ledger(10.0), error="x" * 10_000_000)], 0))

    assert hop.error == "x" * (MAX_MESSAGE_BYTES - 3) + "..."


@pytest.mark.parametrize("attributes", [{"a": object()}, {"a": "\ud800"}])
def test_what_json_cannot_say_is_an_error_of_one_kind(attributes: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        hops.encode([told(Ledger(10.0), attributes=attributes)], 0)

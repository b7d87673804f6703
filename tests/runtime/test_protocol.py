from __future__ import annotations

import math

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from firsttoken.common.v1 import common_pb2
from services.core.errors import InvalidArgument
from services.core.ledger import Ledger, Segment
from services.core.sampling import Sampling
from services.runtime.protocol import (
    LEDGER_KEY,
    check_sampling,
    is_batch,
    ledger_to_proto,
    sampling_from_proto,
    spend_callee,
    spend_failed_call,
    tenant_of,
)


def test_absent_fields_are_the_defaults() -> None:
    assert sampling_from_proto(common_pb2.SamplingParams()) == Sampling()


def test_every_field_is_taken() -> None:
    message = common_pb2.SamplingParams(
        max_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        seed=6,
        stop=["a", "b"],
        stop_token_ids=[7, 8],
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logprobs=0,
        ignore_eos=True,
        skip_special_tokens=False,
    )

    assert len(message.DESCRIPTOR.fields) == len(Sampling._fields)
    assert sampling_from_proto(message) == Sampling(
        max_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        seed=6,
        stop=("a", "b"),
        stop_token_ids=(7, 8),
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logprobs=0,
        ignore_eos=True,
        skip_special_tokens=False,
    )


def test_a_zero_that_was_sent_is_not_a_default() -> None:
    sampling = sampling_from_proto(common_pb2.SamplingParams(max_tokens=0, top_p=0))

    assert (sampling.max_tokens, sampling.top_p) == (0, 0.0)


def test_bad_parameters_are_named_under_sampling() -> None:
    sampling = sampling_from_proto(common_pb2.SamplingParams(temperature=math.nan, max_tokens=0))
    with pytest.raises(InvalidArgument) as caught:
        check_sampling(sampling, max_context_tokens=100, vocabulary_size=1000)

    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["sampling.max_tokens", "sampling.temperature"]


def test_only_batch_is_batch() -> None:
    assert is_batch(common_pb2.REQUEST_CLASS_BATCH)
    assert not is_batch(common_pb2.REQUEST_CLASS_INTERACTIVE)
    assert not is_batch(common_pb2.REQUEST_CLASS_UNSPECIFIED)


def test_a_class_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="request_class: is no request class; got 9"):
        is_batch(9)  # type: ignore[arg-type]


def test_the_tenant_travels_in_metadata() -> None:
    assert tenant_of(None) == ""
    assert tenant_of([("other", "x")]) == ""
    assert tenant_of([("other", b"x"), ("firsttoken-tenant", "acme corp")]) == "acme corp"
    assert tenant_of([("firsttoken-tenant", "")]) == ""
    assert tenant_of([("firsttoken-tenant", "x" * 128)]) == "x" * 128


@pytest.mark.parametrize("tenant", ["x" * 129, "a\nb", "\u00fcber", b"bytes"])
def test_a_tenant_that_cannot_be_is_refused(tenant: str | bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tenant_of([("firsttoken-tenant", tenant)])

    assert caught.value.violations[0].field == "metadata.firsttoken-tenant"


def test_a_ledger_becomes_milliseconds() -> None:
    ledger = Ledger(arrived_s=1.0)
    for index, segment in enumerate(Segment, start=1):
        ledger.spend(segment, index / 1000)
    ledger.mark_first_token(2.0)
    message = ledger_to_proto(ledger)

    assert [round(getattr(message, f"{segment}_ms"), 6) for segment in Segment] == [
        *range(1, len(Segment) + 1)
    ]
    assert message.total_ms == 1000.0


def test_what_the_callee_did_not_have_is_transfer_and_its_residual_stays_unowned() -> None:
    callee = common_pb2.Ledger(preprocess_ms=100, prefill_ms=300, transfer_ms=50, total_ms=500)
    ledger = Ledger(arrived_s=0.0)
    ledger.record(Segment.QUEUE, 0.0, 0.1)
    spend_callee(ledger, callee, seen_s=0.75)
    ledger.mark_first_token(0.85)

    assert ledger.spent_s(Segment.PREPROCESS) == pytest.approx(0.1)
    assert ledger.spent_s(Segment.PREFILL) == pytest.approx(0.3)
    assert ledger.spent_s(Segment.TRANSFER) == pytest.approx(0.05 + 0.25)
    assert ledger.residual_s == pytest.approx(0.05)  # 500 less the 450 that it owns


def failure(**trailing: bytes) -> AioRpcError:
    return AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(*trailing.items()))


def test_what_a_failed_call_tells_of_its_time_is_entered() -> None:
    callee = common_pb2.Ledger(preprocess_ms=100, total_ms=150)
    ledger = Ledger(arrived_s=0.0)
    spend_failed_call(ledger, failure(**{LEDGER_KEY: callee.SerializeToString()}), seen_s=0.25)

    assert ledger.spent_s(Segment.PREPROCESS) == pytest.approx(0.1)
    assert ledger.spent_s(Segment.TRANSFER) == pytest.approx(0.1)


@pytest.mark.parametrize("trailing", [{}, {LEDGER_KEY: b"\xff"}, {"other-bin": b""}])
def test_the_time_of_a_failed_call_that_tells_nothing_is_nobody_s(
    trailing: dict[str, bytes],
) -> None:
    ledger = Ledger(arrived_s=0.0)
    spend_failed_call(ledger, failure(**trailing), seen_s=0.25)

    assert list(ledger.sums_s()) == []


@pytest.mark.parametrize("told_ms", [math.nan, math.inf, -math.inf, 1e300])
def test_a_duration_that_is_none_is_not_entered(told_ms: float) -> None:
    ledger = Ledger(10.0)
    ledger.mark_first_token(11.0)
    callee = common_pb2.Ledger(prefill_ms=told_ms, total_ms=told_ms, hidden_ms={"load": told_ms})
    spend_callee(ledger, callee, seen_s=1.0)

    assert dict(ledger.sums_s()) == {Segment.TRANSFER: 1.0}
    assert ledger.hidden_s == {}
    assert ledger.residual_s == 0.0

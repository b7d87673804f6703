from __future__ import annotations

import pytest

from services.core.ledger import Ledger, Segment


def test_segments_add_up_and_what_nobody_owns_is_the_residual() -> None:
    ledger = Ledger(arrived_s=10.0)
    ledger.record(Segment.QUEUE, 10.0, 10.25)
    ledger.record(Segment.PREFILL, 10.5, 11.0)
    ledger.record(Segment.PREFILL, 11.0, 11.125)
    ledger.mark_first_token(12.0)

    assert ledger.spent_s(Segment.QUEUE) == 0.25
    assert ledger.spent_s(Segment.PREFILL) == 0.625
    assert ledger.spent_s(Segment.TRANSFER) == 0.0
    assert ledger.total_s == 2.0
    assert ledger.residual_s == pytest.approx(1.125)
    assert len(ledger.intervals) == 3


def test_durations_of_others_count_and_have_no_place_on_this_clock() -> None:
    ledger = Ledger(arrived_s=0.0)
    ledger.spend(Segment.KV_LOAD, 0.5)
    ledger.spend(Segment.KV_LOAD, 0.25)

    assert ledger.spent_s(Segment.KV_LOAD) == 0.75
    assert ledger.intervals == []


def test_only_the_first_token_counts() -> None:
    ledger = Ledger(arrived_s=1.0)
    before = ledger.total_s
    ledger.mark_first_token(2.0)
    ledger.mark_first_token(5.0)

    assert (before, ledger.total_s) == (0.0, 1.0)


def test_segments_stand_in_the_order_a_request_meets_them() -> None:
    assert [str(segment) for segment in Segment] == [
        "queue",
        "preprocess",
        "route",
        "prefill_queue",
        "kv_load",
        "prefill",
        "transfer",
    ]

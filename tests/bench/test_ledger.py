from __future__ import annotations

import random
from unittest.mock import Mock

import pytest

from services.bench import ledger
from services.bench.ledger import KINDS, Seen, from_timing, summarise
from services.core.ledger import Ledger, Segment
from services.gateway.accounts import server_timing


@pytest.mark.parametrize(
    ("total_ms", "residual_ms", "closed"),
    [(10.0, 1.0, True), (10.0, 1.1, False), (10.0, -1.1, False), (300.0, 3.0, True)],
)
def test_a_ledger_is_closed_within_a_millisecond_or_a_hundredth(
    total_ms: float, residual_ms: float, closed: bool
) -> None:
    assert Seen(total_ms, residual_ms).is_closed is closed


def test_a_row_says_how_many_are_closed_and_how_far_the_worst_is_from_it() -> None:
    row = summarise("all", [Seen(10.0, 0.5), Seen(10.0, -2.0), Seen(20.0, 0.25), Seen(30.0, 0.75)])

    assert (row["requests"], row["closed"], row["total_p50_ms"]) == (4, 0.75, 15.0)
    assert row["residual_p50_ms"] == pytest.approx(0.625)
    assert row["residual_worst_ms"] == -2.0


def test_a_refusal_s_header_is_read_as_the_gateway_writes_it() -> None:
    refused = Ledger(1.0)
    refused.record(Segment.PREPROCESS, 1.0, 1.25)
    refused.mark_failure(1.5)

    assert from_timing(server_timing(refused)) == Seen(500.0, 250.0)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("HTTP chat, whole", 503), ("HTTP chat, whole", 400), ("HTTP refused", 503)],
)
async def test_what_fails_is_no_closed_request(
    monkeypatch: pytest.MonkeyPatch, kind: str, status: int
) -> None:
    answer = status, {"server-timing": "residual;dur=0.0, total;dur=1.0"}, b"{}"
    monkeypatch.setattr(ledger, "_exchange", lambda *given: answer)
    with pytest.raises(AssertionError, match=f"HTTP {status}"):
        await KINDS[kind](Mock(), random.Random(1))


def test_every_way_in_has_refusals() -> None:
    assert {kind.split()[0] for kind in KINDS if "refused" in kind} == {"gRPC", "HTTP"}

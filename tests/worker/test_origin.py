from __future__ import annotations

import pytest

from firsttoken.worker.v1 import worker_pb2
from services.core.ledger import Interval, Ledger, Segment
from worker.messages import Token
from worker.origin import Origin
from worker.stream import Arrival

FIRST = Token(1, 7, "", None, None)
SECOND = Token(1, 8, "", None, None, began_s=10.25)


def handed_off(*, same_clock: bool) -> Origin:
    origin = Origin()
    first = worker_pb2.FirstToken(evaluated_s=10.2)
    before = [Interval(Segment.PREFILL_QUEUE, 9.0, 9.1)]
    origin.hand_off(first, before=before, called_s=9.1, same_clock=same_clock)
    return origin


@pytest.mark.parametrize(
    "arrivals",
    [
        [Arrival([FIRST], 10.22), Arrival([SECOND], 10.3)],
        [Arrival([FIRST], 10.22), Arrival([SECOND, SECOND], 10.3)],
        [Arrival([FIRST, SECOND], 10.3)],
    ],
)
def test_the_gap_ends_where_the_step_of_the_second_token_begins(arrivals: list[Arrival]) -> None:
    origin, ledger = handed_off(same_clock=True), Ledger(9.0)
    for arrival in arrivals:
        origin.note(arrival, ledger)

    assert origin.path.handoff_gap_ms == pytest.approx(50)
    assert origin.handoff_ms == pytest.approx(80 if len(arrivals) == 2 else 0)


def test_clocks_of_two_hosts_are_not_compared() -> None:
    origin, ledger = handed_off(same_clock=False), Ledger(9.0)
    origin.note(Arrival([FIRST], 10.22), ledger)
    origin.note(Arrival([SECOND], 10.3), ledger)

    assert origin.path.handoff_gap_ms == 0
    assert origin.handoff_ms == pytest.approx(80)


def test_an_answer_of_ones_own_has_no_gap() -> None:
    origin, ledger = Origin(), Ledger(9.0)
    origin.note(Arrival([FIRST, SECOND], 10.3), ledger)

    assert origin.path.handoff_gap_ms == origin.handoff_ms == 0

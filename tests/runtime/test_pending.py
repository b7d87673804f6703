from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.observer.v1 import observer_pb2
from services.core.ledger import Ledger
from services.runtime import pending as pending_module
from services.runtime.hops import Told
from services.runtime.pending import MAX_HOPS, MAX_PROMPT_BYTES, Pending
from services.runtime.telemetry import TraceContext

CONTEXT = TraceContext("0" * 31 + "1", "0" * 15 + "1", True)
LEDGER = Ledger(0.0)


def told(number: int) -> Told:
    return Told(str(number), CONTEXT, "", LEDGER, {}, "", 0.0)


def fill(pending: Pending, numbers: range) -> None:
    for number in numbers:
        pending.add_hop(told(number))


def taken(pending: Pending) -> list[int]:
    return [int(each.name) for each in pending.take_hops(10 * MAX_HOPS)]


def test_of_too_many_the_oldest_are_dropped_and_counted() -> None:
    pending = Pending()
    fill(pending, range(MAX_HOPS + 3))

    assert pending.num_dropped == 3
    assert taken(pending) == list(range(3, MAX_HOPS + 3))


@given(first=st.integers(0, 20), then=st.integers(0, 20))
def test_what_is_put_back_comes_first_again(first: int, then: int) -> None:
    pending = Pending()
    fill(pending, range(first))
    back = pending.take_hops(first)
    fill(pending, range(first, first + then))
    pending.put_back(back)

    pending.check_integrity()
    assert taken(pending) == list(range(first + then))


def test_what_is_put_back_without_room_is_dropped_the_oldest_first() -> None:
    pending = Pending()
    back = [told(number) for number in range(5)]
    fill(pending, range(5, MAX_HOPS + 3))
    pending.put_back(back)

    pending.check_integrity()
    assert pending.num_dropped == 3
    assert taken(pending) == list(range(3, MAX_HOPS + 3))


def test_prompts_are_bounded_by_their_tokens() -> None:
    pending, message = Pending(), observer_pb2.ReportRequest()
    size = MAX_PROMPT_BYTES // 4
    for number in range(6):
        pending.add_prompt(observer_pb2.Prompt(first_token=number, token_ids=bytes(size)))
    pending.check_integrity()
    pending.move_others(message)
    pending.check_integrity()

    assert [prompt.first_token for prompt in message.prompts] == [2, 3, 4, 5]


def test_evictions_are_told_by_holder_and_bubbles_by_stage() -> None:
    pending, message = Pending(), observer_pb2.ReportRequest()
    pending.add_evicted("w1", [b"a" * 32, b"b" * 32])
    pending.add_evicted("w2", [b"c" * 32])
    pending.add_evicted("w1", [b"d" * 32])
    pending.add_bubble("queue", 1.0)
    pending.add_bubble("route", 0.5)
    pending.move_others(message)

    assert {each.holder_id: each.prefix_keys for each in message.evictions} == {
        "w1": b"a" * 32 + b"b" * 32 + b"d" * 32,
        "w2": b"c" * 32,
    }
    assert {each.stage: each.duration_s for each in message.bubbles} == {"queue": 1.0, "route": 0.5}


def test_evictions_are_bounded() -> None:
    pending, message = Pending(), observer_pb2.ReportRequest()
    pending.add_evicted("w", (bytes(32) for _ in range(pending_module.MAX_EVICTED + 10)))
    pending.move_others(message)

    assert len(message.evictions[0].prefix_keys) == 32 * pending_module.MAX_EVICTED

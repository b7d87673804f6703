from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.observer.v1 import observer_pb2
from services.core.ledger import Ledger
from services.runtime import pending as pending_module
from services.runtime.hops import Told, decode
from services.runtime.pending import (
    BATCH_HOPS,
    MAX_BATCHES,
    MAX_PROMPT_BYTES,
    MAX_PROMPTS,
    MOST_BATCHES,
    Pending,
)
from services.runtime.telemetry import TraceContext

CONTEXT = TraceContext("0" * 31 + "1", "0" * 15 + "1", True)
LEDGER = Ledger(0.0)


def told(number: int, **attributes: object) -> Told:
    return Told(str(number), CONTEXT, "", LEDGER, attributes, "", 0.0)


def fill(pending: Pending, numbers: range) -> None:
    for number in numbers:
        pending.add_hop(told(number))
        pending.check_integrity()


def taken(pending: Pending) -> list[int]:
    message = observer_pb2.ReportRequest()
    while pending.has_hops:
        pending.move_hops(message)
    return [int(hop.name) for batch in message.hops_json for hop in decode(batch)]


def test_of_too_many_the_oldest_are_dropped_and_counted() -> None:
    pending = Pending()
    fill(pending, range(BATCH_HOPS * MAX_BATCHES + 3))

    assert taken(pending) == list(range(BATCH_HOPS, BATCH_HOPS * MAX_BATCHES + 3))
    assert pending.num_dropped == BATCH_HOPS


@given(first=st.integers(0, 200), then=st.integers(0, 200))
def test_what_is_put_back_comes_first_again(first: int, then: int) -> None:
    pending = Pending()
    fill(pending, range(first))
    back = pending.move_hops(observer_pb2.ReportRequest())
    fill(pending, range(first, first + then))
    pending.put_back(back)

    pending.check_integrity()
    assert taken(pending) == list(range(first + then))


def test_what_is_put_back_without_room_is_dropped_the_oldest_first() -> None:
    pending = Pending()
    fill(pending, range(2 * BATCH_HOPS))
    back = pending.move_hops(observer_pb2.ReportRequest())
    fill(pending, range(2 * BATCH_HOPS, BATCH_HOPS * (MAX_BATCHES + 1)))
    pending.put_back(back)

    pending.check_integrity()
    assert pending.num_dropped == BATCH_HOPS
    assert taken(pending)[0] == BATCH_HOPS


def test_a_message_is_bounded() -> None:
    pending, message = Pending(), observer_pb2.ReportRequest()
    fill(pending, range(BATCH_HOPS * MAX_BATCHES))
    pending.move_hops(message)

    assert len(message.hops_json) == MOST_BATCHES


def test_what_cannot_be_told_is_dropped_and_its_batch_told_without_it() -> None:
    pending = Pending()
    for number in range(BATCH_HOPS):
        pending.add_hop(told(number, bad=object()) if number == 7 else told(number))

    assert taken(pending) == [number for number in range(BATCH_HOPS) if number != 7]
    assert pending.num_dropped == 1


def test_prompts_are_bounded_by_their_tokens() -> None:
    pending, message = Pending(), observer_pb2.ReportRequest()
    size = MAX_PROMPT_BYTES // 4
    for number in range(6):
        pending.add_prompt(observer_pb2.Prompt(first_token=number, token_ids=bytes(size)))
    pending.check_integrity()
    pending.move_others(message)
    pending.check_integrity()

    assert [prompt.first_token for prompt in message.prompts] == [2, 3, 4, 5]


def test_prompts_are_bounded_also_where_only_their_keys_are_told() -> None:
    pending, message = Pending(), observer_pb2.ReportRequest()
    keys = bytes(MAX_PROMPT_BYTES // 4)
    for number in range(6):
        pending.add_prompt(observer_pb2.Prompt(first_token=number, prefix_keys=keys))
        pending.check_integrity()
    pending.move_others(message)

    assert [prompt.first_token for prompt in message.prompts] == [2, 3, 4, 5]


def test_no_more_prompts_wait_than_an_observer_keeps() -> None:
    pending, message = Pending(), observer_pb2.ReportRequest()
    for number in range(MAX_PROMPTS + 2):
        pending.add_prompt(observer_pb2.Prompt(first_token=number))
    pending.check_integrity()
    pending.move_others(message)

    assert [prompt.first_token for prompt in message.prompts] == [*range(2, MAX_PROMPTS + 2)]


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

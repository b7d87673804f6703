"""The queue's rules one by one."""

from __future__ import annotations

from typing import Any

import pytest

from router.admission import AdmissionQueue, AdmissionSettings, RequestClass, Ticket, TicketState
from services.core.errors import Overloaded

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
AGEING_S = 5.0


def make_settings(*, max_queue: int = 100, **others: Any) -> AdmissionSettings:
    return AdmissionSettings(max_queue=max_queue, **{"ageing_s": AGEING_S, **others})


def make_queue(**settings: Any) -> AdmissionQueue[str]:
    return AdmissionQueue(make_settings(**settings))


def enter(
    queue: AdmissionQueue[str],
    request_class: RequestClass = INTERACTIVE,
    *,
    room: int = 0,
    now_s: float = 0.0,
    **request: Any,
) -> Ticket[str]:
    return queue.enter(request_class, now_s=now_s, room=lambda: room, **request)


def put(
    queue: AdmissionQueue[str],
    name: str,
    now_s: float,
    request_class: RequestClass = INTERACTIVE,
    **request: Any,
) -> Ticket[str]:
    ticket = enter(queue, request_class, now_s=now_s, **request)
    queue.join(ticket, name, now_s)
    return ticket


def drain(queue: AdmissionQueue[str], now_s: float = 1000.0) -> list[str]:
    names = []
    while (ticket := queue.head()) is not None:
        names.append(queue.grant(ticket, now_s))
    return names


def test_serves_a_class_in_the_order_of_arrival() -> None:
    queue = make_queue()
    for now_s, name in enumerate("abcd"):
        put(queue, name, now_s)

    assert drain(queue) == list("abcd")


def test_serves_interactive_before_batch() -> None:
    queue = make_queue()
    put(queue, "batch", 0.0, BATCH)
    put(queue, "interactive", 1.0)

    assert drain(queue) == ["interactive", "batch"]


def test_serves_a_batch_request_before_interactive_ones_that_came_much_later() -> None:
    queue = make_queue(ageing_s=5.0)
    put(queue, "batch", 0.0, BATCH)
    put(queue, "early", 4.9)
    put(queue, "late", 5.0)

    assert drain(queue) == ["early", "batch", "late"]


def test_follows_a_change_of_ageing_for_those_already_waiting() -> None:
    queue = make_queue(ageing_s=5.0)
    put(queue, "batch", 0.0, BATCH)
    put(queue, "interactive", 1.0)
    queue.configure(make_settings(ageing_s=0.5))

    assert drain(queue) == ["batch", "interactive"]


def test_brings_a_returned_request_to_the_front_of_its_class() -> None:
    queue = make_queue()
    first, _ = put(queue, "first", 0.0), put(queue, "second", 1.0)
    queue.grant(first, 2.0)
    queue.join(first, "first again", 3.0)

    assert first.queued_s == 0.0
    assert drain(queue) == ["first again", "second"]


@pytest.mark.parametrize("state", list(TicketState))
def test_gives_up_a_place_in_whatever_state(state: TicketState) -> None:
    queue = make_queue()
    with enter(queue) as ticket:
        if state is not TicketState.PREPARING:
            queue.join(ticket, "request", 0.0)
        if state is TicketState.GRANTED:
            queue.grant(ticket, 0.0)
        if state is TicketState.LEFT:
            queue.leave(ticket)
        assert ticket.state is state
    queue.check_integrity()

    assert queue.num_pending == 0
    assert queue.head() is None


def test_admits_as_many_as_workers_have_room_for_and_the_bound_more() -> None:
    queue = make_queue(max_queue=2)
    for _ in range(5):
        enter(queue, room=3)
    with pytest.raises(Overloaded, match="5 requests wait") as refusal:
        enter(queue, room=3)

    assert refusal.value.reason == "QUEUE_FULL"
    assert refusal.value.retry_delay_s is not None


def test_without_a_queue_admits_only_what_a_worker_can_take_at_once() -> None:
    queue = make_queue(max_queue=0)
    ticket = enter(queue, room=1)
    with pytest.raises(Overloaded):
        enter(queue, room=1)
    queue.join(ticket, "request", 0.0)
    queue.grant(ticket, 0.0)

    enter(queue, room=1)


def test_counts_a_request_under_preparation_against_the_bound() -> None:
    queue = make_queue(max_queue=1)
    with enter(queue), pytest.raises(Overloaded):
        enter(queue)

    enter(queue)


def test_asks_to_come_back_when_the_queue_will_have_drained() -> None:
    queue = make_queue(max_queue=20)
    waiting = [put(queue, str(number), 0.0) for number in range(20)]
    for number, ticket in enumerate(waiting[:8]):  # four a second
        queue.grant(ticket, (number + 1) * 0.25)
    for number in range(8):
        put(queue, str(number), 2.0)
    with pytest.raises(Overloaded) as refusal:
        enter(queue)

    assert refusal.value.retry_delay_s == pytest.approx(20 / 4, rel=0.1)


def taken_every(queue: AdmissionQueue[str], interval_s: float, count: int = 4) -> float:
    """Workers take one each `interval_s`, from 0 on. Returns when they have taken `count`."""
    for ticket in [put(queue, str(number), 0.0) for number in range(count)]:
        queue.grant(ticket, (ticket.rank.number) * interval_s)
    return count * interval_s


def test_measures_the_drain_only_while_somebody_waits() -> None:
    queue = make_queue(max_queue=1000)
    now_s = taken_every(queue, 0.5, count=10)
    queue.configure(make_settings(max_queue=1))
    put(queue, "after a silence", now_s + 10)
    with pytest.raises(Overloaded) as refusal:
        enter(queue, now_s=now_s + 10)

    assert refusal.value.retry_delay_s == pytest.approx(0.5, rel=0.1)


def refusal_of(queue: AdmissionQueue[str], *args: Any, **request: Any) -> Overloaded:
    with pytest.raises(Overloaded) as refusal:
        enter(queue, *args, **request)
    queue.check_integrity()
    return refusal.value


def test_refuses_who_would_wait_beyond_its_deadline() -> None:
    queue = make_queue()
    now_s = taken_every(queue, 0.5)
    for number in range(6):
        put(queue, str(number), now_s)
    # The seventh is taken in 3.5 s.
    refusal = refusal_of(queue, now_s=now_s, remaining_s=3.0)

    assert refusal.reason == "EXPECTED_WAIT"
    assert "its deadline is in 3 s" in refusal.message
    assert refusal.retry_delay_s == pytest.approx(0.5, rel=0.15)
    enter(queue, now_s=now_s, remaining_s=4.0)


@pytest.mark.parametrize("request_class", list(RequestClass))
def test_refuses_who_would_wait_longer_than_its_class_allows(request_class: RequestClass) -> None:
    bound = f"max_wait_{request_class.value}_s"
    within: dict[str, Any] = {bound: 3.0}
    queue = make_queue(**within)
    now_s = taken_every(queue, 0.5)
    for number in range(6):
        put(queue, str(number), now_s, request_class)
    refusal = refusal_of(queue, request_class, now_s=now_s, remaining_s=60.0)

    assert refusal.reason == "EXPECTED_WAIT"
    assert f"router.{bound} is 3" in refusal.message
    queue.configure(make_settings())
    enter(queue, request_class, now_s=now_s, remaining_s=60.0)


def test_who_comes_back_when_told_is_let_in() -> None:
    queue = make_queue()
    begun_s = taken_every(queue, 0.5, count=10)
    waiting = [put(queue, str(number), begun_s) for number in range(10)]
    delay_s = refusal_of(queue, now_s=begun_s, remaining_s=2.0).retry_delay_s
    assert delay_s is not None
    assert delay_s == pytest.approx(10 * 0.5 + 0.5 - 2.0, rel=0.15)
    now_s = begun_s
    while now_s < begun_s + delay_s:
        now_s += 0.5
        queue.grant(waiting.pop(0), now_s)

    enter(queue, now_s=now_s, remaining_s=2.1)


def test_refuses_nobody_while_the_drain_is_unknown() -> None:
    queue = make_queue(max_wait_interactive_s=0.1)
    for number in range(50):
        put(queue, str(number), float(number), remaining_s=0.001)


def test_forgets_a_drain_of_long_ago() -> None:
    queue = make_queue(max_wait_interactive_s=0.1)
    now_s = taken_every(queue, 0.5)
    put(queue, "a", now_s, room=1)
    refusal_of(queue, now_s=now_s)

    enter(queue, now_s=now_s + 60)


def test_who_goes_behind_does_not_lengthen_the_wait() -> None:
    queue = make_queue(weights={"light": 0.5})
    now_s = taken_every(queue, 1.0)
    for number in range(10):
        put(queue, str(number), now_s, tenant="busy")
        put(queue, str(number), now_s, BATCH)

    enter(queue, now_s=now_s, tenant="other", remaining_s=2.5)  # behind one of the busy one's
    enter(queue, now_s=now_s, tenant="light", remaining_s=5.0)
    assert refusal_of(queue, now_s=now_s, tenant="busy", remaining_s=10.0)
    assert refusal_of(queue, BATCH, now_s=now_s, tenant="other", remaining_s=10.0)


def test_batch_that_has_aged_lengthens_the_wait() -> None:
    queue = make_queue(ageing_s=5.0)
    now_s = taken_every(queue, 1.0)
    for number in range(5):
        put(queue, str(number), now_s, BATCH)
    enter(queue, now_s=now_s + 4, remaining_s=3.0).__exit__(None, None, None)

    assert refusal_of(queue, now_s=now_s + 5, remaining_s=3.0).reason == "EXPECTED_WAIT"


def test_refuses_nobody_for_whom_a_worker_has_room() -> None:
    queue = make_queue(max_wait_interactive_s=0.1)
    now_s = taken_every(queue, 1.0)
    for _ in range(3):
        enter(queue, now_s=now_s, room=3, remaining_s=0.01)

    assert refusal_of(queue, now_s=now_s, room=3, remaining_s=0.01)


def test_a_wait_for_nothing_counts_as_one() -> None:
    queue = make_queue()
    now_s = taken_every(queue, 0.5, count=6)
    ticket = put(queue, "first", now_s)
    for _ in range(20):  # Workers that fail at once take nobody.
        queue.grant(ticket, now_s + 0.5)
        queue.join(ticket, "first", now_s + 0.5)
    for number in range(10):
        put(queue, str(number), now_s + 0.5)

    assert refusal_of(queue, now_s=now_s + 0.5, remaining_s=4.0)

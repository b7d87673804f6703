"""The queue against an oracle that is a plain list, and its rules one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import AdmissionQueue, RequestClass, Ticket, TicketState
from services.core.errors import Overloaded

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
AGEING_S = 5.0


def make_queue(*, max_queue: int = 100, ageing_s: float = AGEING_S) -> AdmissionQueue[str]:
    return AdmissionQueue(max_queue=max_queue, ageing_s=ageing_s)


def put(
    queue: AdmissionQueue[str], name: str, now_s: float, request_class: RequestClass = INTERACTIVE
) -> Ticket[str]:
    ticket = queue.enter(request_class, room=0)
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
    queue.configure(max_queue=100, ageing_s=0.5)

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
    with queue.enter(INTERACTIVE, room=0) as ticket:
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
        queue.enter(INTERACTIVE, room=3)
    with pytest.raises(Overloaded, match="5 requests wait") as refusal:
        queue.enter(INTERACTIVE, room=3)

    assert refusal.value.reason == "QUEUE_FULL"
    assert refusal.value.retry_delay_s is not None


def test_without_a_queue_admits_only_what_a_worker_can_take_at_once() -> None:
    queue = make_queue(max_queue=0)
    ticket = queue.enter(INTERACTIVE, room=1)
    with pytest.raises(Overloaded):
        queue.enter(INTERACTIVE, room=1)
    queue.join(ticket, "request", 0.0)
    queue.grant(ticket, 0.0)

    queue.enter(INTERACTIVE, room=1)


def test_counts_a_request_under_preparation_against_the_bound() -> None:
    queue = make_queue(max_queue=1)
    with queue.enter(INTERACTIVE, room=0), pytest.raises(Overloaded):
        queue.enter(INTERACTIVE, room=0)

    queue.enter(INTERACTIVE, room=0)


def test_asks_to_come_back_when_the_queue_will_have_drained() -> None:
    queue = make_queue(max_queue=20)
    waiting = [put(queue, str(number), 0.0) for number in range(20)]
    for number, ticket in enumerate(waiting[:8]):  # four a second
        queue.grant(ticket, (number + 1) * 0.25)
    for number in range(8):
        put(queue, str(number), 2.0)
    with pytest.raises(Overloaded) as refusal:
        queue.enter(INTERACTIVE, room=0)

    assert refusal.value.retry_delay_s == pytest.approx(20 / 4, rel=0.1)


def test_measures_the_drain_only_while_somebody_waits() -> None:
    queue = make_queue(max_queue=1)
    queue.grant(put(queue, "before", 0.0), 0.5)  # one in half a second
    put(queue, "after a long silence", 600.0)
    with pytest.raises(Overloaded) as refusal:
        queue.enter(INTERACTIVE, room=0)

    assert refusal.value.retry_delay_s == pytest.approx(0.5)


# --- against an oracle


class Waiting(NamedTuple):
    name: str
    request_class: RequestClass
    queued_s: float


@dataclass
class Oracle:
    """The rules, said as plainly as possible: a list in the order of joining."""

    waiting: list[Waiting] = field(default_factory=list)

    def next(self) -> Waiting | None:
        interactive = next(
            (each for each in self.waiting if each.request_class is INTERACTIVE), None
        )
        batch = next((each for each in self.waiting if each.request_class is BATCH), None)
        if interactive and batch:
            return batch if interactive.queued_s - batch.queued_s >= AGEING_S else interactive
        return interactive or batch


Operation = tuple[str, int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["interactive", "batch", "join", "grant", "return", "leave", "wait"]),
        st.integers(0, 20),
    ),
    max_size=80,
)


@given(operations)
@settings(deadline=None)
def test_agrees_with_the_oracle(script: list[Operation]) -> None:
    queue: AdmissionQueue[str] = make_queue(max_queue=8)
    oracle = Oracle()
    tickets: dict[str, Ticket[str]] = {}
    now_s = 0.0

    def pick(state: TicketState, number: int) -> str | None:
        names = [name for name, ticket in tickets.items() if ticket.state is state]
        return names[number % len(names)] if names else None

    for step, (operation, number) in enumerate(script):
        if operation in ("interactive", "batch"):
            pending = queue.num_pending
            try:
                tickets[str(step)] = queue.enter(RequestClass(operation), room=number % 3)
                assert pending < 8 + number % 3
            except Overloaded:
                assert pending >= 8 + number % 3
        elif operation == "join" and (name := pick(TicketState.PREPARING, number)):
            queue.join(tickets[name], name, now_s)
            oracle.waiting.append(Waiting(name, tickets[name].request_class, now_s))
        elif operation == "return" and (name := pick(TicketState.GRANTED, number)):
            ticket = tickets[name]
            queue.join(ticket, name, now_s)
            oracle.waiting.insert(0, Waiting(name, ticket.request_class, ticket.queued_s))
        elif operation == "leave" and (name := pick(TicketState.WAITING, number)):
            queue.leave(tickets[name])
            oracle.waiting = [each for each in oracle.waiting if each.name != name]
        elif operation == "grant" and (head := queue.head()) is not None:
            expected = oracle.next()
            assert expected is not None
            assert queue.grant(head, now_s) == expected.name
            oracle.waiting.remove(expected)
        elif operation == "wait":
            now_s += number / 2
        queue.check_integrity()
        assert queue.num_waiting == len(oracle.waiting)

    assert (queue.head() is None) == (oracle.next() is None)

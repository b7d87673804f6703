"""The queue through random schedules, step by step against an oracle."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import pytest

from router.admission import AdmissionQueue, AdmissionSettings, RequestClass, Ticket, TicketState
from services.core.errors import Overloaded
from tests.router.admission_oracle import Oracle, Request

NUM_BATCHES, SCHEDULES_PER_BATCH = 10, 1000
STEPS = ("enter", "join", "grant", "return", "leave", "wait", "configure")
# An open queue; one that workers keep up with; one that grows; cancels and retries.
MIXES = (
    (30, 25, 15, 3, 3, 20, 1),
    (30, 30, 20, 2, 2, 15, 1),
    (35, 35, 20, 0, 1, 8, 0),
    (25, 20, 15, 15, 15, 10, 2),
)
PICKED_FROM = {
    "join": TicketState.PREPARING,
    "return": TicketState.GRANTED,
}


class Pair(NamedTuple):
    """One request, as the queue and as the oracle know it."""

    ticket: Ticket[str]
    request: Request


def make_settings(rng: random.Random) -> AdmissionSettings:
    # Powers of two, whose sums are exact: equal ends are equal in both.
    return AdmissionSettings(
        max_queue=rng.choice([0, 3, 9, 100, 100]),
        ageing_s=rng.choice([0.0, 0.5, 5.0]),
        max_wait_interactive_s=rng.choice([0.0, 0.0, 1.71]),
        max_wait_batch_s=rng.choice([0.0, 0.0, 3.3]),
        weights={tenant: rng.choice([0.25, 0.5, 1.0, 2.0, 8.0]) for tenant in "abc"},
    )


class Schedule:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        settings = make_settings(self.rng)
        self.queue: AdmissionQueue[str] = AdmissionQueue(settings)
        self.oracle = Oracle(settings)
        self.pairs: list[Pair] = []
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()

    def run(self, num_steps: int) -> None:
        steps = self.rng.choices(STEPS, self.rng.choice(MIXES), k=num_steps)
        for step in steps:
            self.step(step)
            self.compare()
        self.queue.check_integrity()
        for ticket, _ in self.pairs:
            with ticket:
                pass
        self.queue.check_integrity()
        assert self.queue.num_pending == self.queue.num_tenants == 0

    def compare(self) -> None:
        head, expected = self.queue.head(), self.oracle.next()
        assert (head and head.item) == (expected and expected.name)
        oldest, waiting = self.queue.oldest(), self.oracle.waiting()
        assert (oldest and oldest.item) == (waiting[0].name if waiting else None)
        assert self.queue.num_waiting == len(waiting)
        assert self.queue.num_pending == len(self.oracle.pending())

    def step(self, step: str) -> None:
        if step == "wait":
            self.now_s += self.rng.choice([0.125, 0.5, 0.5, 2.0])
        elif step == "configure":
            settings = make_settings(self.rng)
            self.queue.configure(settings)
            self.oracle.configure(settings)
        elif step == "enter":
            self.enter()
        elif step == "grant":
            self.grant()
        elif pair := self.pick(PICKED_FROM.get(step)):
            if step == "leave":
                self.queue.leave(pair.ticket)
                self.oracle.leave(pair.request)
            else:
                self.queue.join(pair.ticket, pair.request.name, self.now_s)
                self.oracle.join(pair.request, self.now_s)

    def pick(self, state: TicketState | None) -> Pair | None:
        """None: in any state but the last."""
        found = [
            pair
            for pair in self.pairs
            if pair.ticket.state is (state or pair.ticket.state)
            and pair.ticket.state is not TicketState.LEFT
        ]
        return self.rng.choice(found) if found else None

    def enter(self) -> None:
        request_class = self.rng.choice([RequestClass.INTERACTIVE, RequestClass.BATCH])
        tenant = self.rng.choice("aaabcdd")
        room = 0 if self.queue.num_waiting else self.rng.choice([0, 0, 1, 4])
        remaining_s = self.rng.choice([None, 0.07, 0.37, 2.9])
        request = Request(str(len(self.pairs)), request_class, tenant)
        expected = self.oracle.refusal(request, self.now_s, room, remaining_s)
        refusal: tuple[str, Any] | None = None
        try:
            ticket = self.queue.enter(
                request_class,
                now_s=self.now_s,
                room=lambda: room,
                tenant=tenant,
                remaining_s=remaining_s,
            )
        except Overloaded as error:
            refusal = error.reason, pytest.approx(error.retry_delay_s)
        else:
            self.oracle.enter(request)
            self.pairs.append(Pair(ticket, request))
        assert refusal == expected
        self.seen[refusal[0] if refusal else "entered"] += 1

    def grant(self) -> None:
        expected, head = self.oracle.next(), self.queue.head()
        if head is not None and expected is not None:
            assert self.queue.grant(head, self.now_s) == expected.name
            self.oracle.grant(expected, self.now_s)
            self.seen["granted"] += 1


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_agrees_with_the_oracle(batch: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(SCHEDULES_PER_BATCH):
        schedule = Schedule(batch * SCHEDULES_PER_BATCH + number)
        try:
            schedule.run(num_steps=50)
        except AssertionError as error:
            error.add_note(f"seed {batch * SCHEDULES_PER_BATCH + number}")
            raise
        seen += schedule.seen

    # The schedules reach what they are for.
    for what in ("entered", "granted", "QUEUE_FULL", "EXPECTED_WAIT"):
        assert seen[what] > SCHEDULES_PER_BATCH / 4

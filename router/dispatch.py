"""Brings requests and workers together.

The queue knows who is next, the fleet where there is room, the strategy which
worker to prefer; this lends them a clock and an event loop. Whatever happens, one
turn follows: grant while somebody waits and some worker has room, give up those
for whom no worker will come, and sleep until the next of these is due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple, TypeAlias

from router.admission import AdmissionQueue, RequestClass, Ticket
from router.fleet import Announced, Fleet, Role, Slot, Worker
from router.prefill import PrefillChoice
from router.strategies import Prompt, make_strategy
from services.core.config import Snapshot
from services.core.errors import Unavailable


class Grant(NamedTuple):
    """A worker for a request. Release it, or leave it as a context, whatever becomes of that."""

    slot: Slot
    # At the worker that may compute the prompt: the prompt is outstanding there until
    # the first token is seen.
    prefill: Slot | None
    # When the wait was over and choosing began, on the dispatcher's clock.
    granted_s: float
    # The configuration under which the worker was chosen.
    generation: int

    @property
    def prefill_address(self) -> str:
        """Empty without a prefill worker."""
        return self.prefill.worker.announced.address if self.prefill else ""

    def release_prefill(self) -> None:
        if self.prefill is not None:
            self.prefill.release()

    def release(self) -> None:
        """May be called twice."""
        self.release_prefill()
        self.slot.release()

    def __enter__(self) -> Grant:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Waiter(NamedTuple):
    prompt: Prompt
    grant: asyncio.Future[Grant]


Place: TypeAlias = Ticket[Waiter]


class Dispatcher:
    """Use it from one event loop. `close` it when no request is left."""

    def __init__(self, snapshot: Snapshot, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fleet = Fleet(on_room=self._turn)
        # Those that only compute prompts. Nobody waits for them.
        self._prefill_fleet = Fleet()
        self._queue = AdmissionQueue[Waiter](max_queue=0, ageing_s=0)
        self._deserted_since_s: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.configure(snapshot)

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_pending(self) -> int:
        return self._queue.num_pending

    @property
    def num_in_flight(self) -> int:
        return self._fleet.num_in_flight

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that answer requests."""
        return self._fleet.workers

    @property
    def prefill_workers(self) -> tuple[Worker, ...]:
        return self._prefill_fleet.workers

    @property
    def max_context_tokens(self) -> int | None:
        return self._fleet.max_context_tokens()

    def configure(self, snapshot: Snapshot) -> None:
        settings = snapshot.config.router
        self._generation = snapshot.generation
        self._strategy = make_strategy(settings)
        self._prefill_choice = PrefillChoice(settings)
        self._worker_wait_s = settings.worker_wait_s
        self._queue.configure(max_queue=settings.max_queue, ageing_s=settings.batch_ageing_s)
        self._turn()

    def update_workers(self, announced: Iterable[Announced]) -> None:
        everyone = tuple(announced)
        self._fleet.update(each for each in everyone if each.role is not Role.PREFILL)
        self._prefill_fleet.update(each for each in everyone if each.role is Role.PREFILL)
        self._turn()

    def enter(self, request_class: RequestClass) -> Place:
        """A place to hold as a context. Raises Overloaded when the queue is full."""
        room = 0 if self._queue.has_place else self._fleet.room(self._clock())
        return self._queue.enter(request_class, room=room)

    async def wait_for_worker(self, place: Place, prompt: Prompt) -> Grant:
        """Raises Unavailable when no worker has been there for router.worker_wait_s."""
        grant: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._queue.join(place, Waiter(prompt, grant), self._clock())
        self._turn()
        try:
            return await grant
        except asyncio.CancelledError:
            # Granted and cancelled in the same turn of the loop: nobody else will release it.
            if grant.done() and not grant.cancelled() and grant.exception() is None:
                grant.result().release()
            raise

    def answered(self, worker: Worker) -> None:
        self._fleet.trust(worker)

    def failed(self, worker: Worker) -> None:
        self._fleet.suspect(worker, self._clock())
        self._turn()

    def refused(self, worker: Worker) -> None:
        """It says that it is full."""
        self._fleet.pause(worker, self._clock())
        self._turn()

    def prefilled(self, worker: Worker) -> None:
        """It has computed a prompt for another."""
        self._prefill_fleet.trust(worker)

    def prefill_failed(self, worker: Worker) -> None:
        self._prefill_fleet.suspect(worker, self._clock())

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def check_idle(self) -> None:
        """For when no request is left: every count is zero."""
        self._queue.check_integrity()
        assert self._queue.num_pending == 0, f"{self._queue.num_pending} places are still held"
        for fleet in (self._fleet, self._prefill_fleet):
            fleet.check_integrity()
            assert fleet.num_in_flight == 0, f"slots are still held: {fleet.workers}"

    def _turn(self) -> None:
        now_s = self._clock()
        self._grant(now_s)
        self._give_up(now_s)
        self._set_alarm(now_s)

    def _grant(self, now_s: float) -> None:
        while (place := self._queue.head()) is not None:
            candidates = self._fleet.candidates(now_s)
            if not candidates:
                return
            granted_s = self._clock()
            prompt, grant = self._queue.grant(place, now_s)
            if grant.done():  # its request was cancelled, and has not run to its end yet
                continue
            worker = self._strategy.choose(candidates, prompt)
            slot = self._fleet.take(worker, prompt.num_tokens)
            prefill = self._take_prefill(worker, prompt, now_s)
            grant.set_result(Grant(slot, prefill, granted_s, self._generation))

    def _take_prefill(self, decode: Worker, prompt: Prompt, now_s: float) -> Slot | None:
        fleet = self._prefill_fleet
        chosen = self._prefill_choice.choose(fleet.workers, decode, prompt, now_s)
        return None if chosen is None else fleet.take(chosen, prompt.num_tokens)

    def _give_up(self, now_s: float) -> None:
        if not self._fleet.is_deserted(now_s):
            self._deserted_since_s = None
            return
        if self._deserted_since_s is None:
            self._deserted_since_s = now_s
        while (place := self._queue.oldest()) is not None and self._patience_s(place) <= now_s:
            waiter = place.item
            assert waiter is not None
            self._queue.leave(place)
            if not waiter.grant.done():
                waiter.grant.set_exception(self._no_worker())

    def _patience_s(self, place: Place) -> float:
        """When a place in line is given up, if no worker comes before."""
        assert self._deserted_since_s is not None
        return max(place.queued_s, self._deserted_since_s) + self._worker_wait_s

    def _no_worker(self) -> Unavailable:
        problem = (
            f"no worker was ready for {self._worker_wait_s:g} s (router.worker_wait_s);"
            f" known: {_ids(self._fleet)}"
        )
        if self._prefill_fleet.workers:
            problem += f"; those that only prefill, and answer nothing: {_ids(self._prefill_fleet)}"
        return Unavailable(problem, reason="NO_WORKER")

    def _set_alarm(self, now_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        place = self._queue.oldest()
        if place is None:
            return
        due_s = self._fleet.next_return_s(now_s)
        if self._deserted_since_s is not None:
            patience_s = self._patience_s(place)
            due_s = patience_s if due_s is None else min(due_s, patience_s)
        if due_s is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(due_s - now_s, 0.0), self._turn)


def _ids(fleet: Fleet) -> str:
    return ", ".join(worker.announced.id for worker in fleet.workers) or "none"

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

from router.admission import AdmissionQueue, AdmissionSettings, RequestClass, Ticket
from router.fleet import Announced, Fleet, Role, Slot, Worker
from router.knowledge import AnnouncedStore, Errand, Knowledge
from router.prefill import PrefillChoice
from router.prompt import Choice, Prompt
from router.reports import Report
from router.strategies import make_strategy
from services.core.config import Snapshot
from services.core.errors import Unavailable
from services.core.settings import MeshConfig


class Grant(NamedTuple):
    """A worker for a request. Release it, or leave it as a context, whatever becomes of that."""

    slot: Slot
    choice: Choice
    # At the worker that may compute the prompt: the prompt is outstanding there until
    # the first token is seen.
    prefill: Slot | None
    # When the wait was over and choosing began, on the dispatcher's clock.
    granted_s: float
    # The configuration under which the worker was chosen.
    generation: int
    # Requests that waited already when it got in line.
    queue_position: int = 0
    # What is known from now on of the workers; none where nobody asks.
    errands: tuple[Errand, ...] = ()
    clock: Callable[[], float] = time.monotonic

    @property
    def prefill_address(self) -> str:
        """Empty without a prefill worker."""
        return self.prefill.worker.announced.address if self.prefill else ""

    def first_token(self) -> None:
        """It has come: the prompt is computed. May be called twice."""
        now_s = self.clock()
        for errand in self.errands:
            errand.first_token(now_s)
        if self.prefill is not None:
            self.prefill.release()

    def finished(
        self,
        *,
        cached_tokens: int,
        evaluated_tokens: int,
        loaded_blocks: int = 0,
        load_s: float = 0.0,
    ) -> None:
        """The answer is whole, and its worker says what it found and did: once at most."""
        now_s = self.clock()
        for errand in self.errands[:1]:
            errand.finished(
                cached_tokens=cached_tokens,
                evaluated_tokens=evaluated_tokens,
                loaded_blocks=loaded_blocks,
                load_s=load_s,
                now_s=now_s,
            )

    def release(self) -> None:
        """May be called twice. What was expected and is not finished is expected no longer."""
        now_s = self.clock()
        for errand in self.errands:
            errand.release(now_s)
        if self.prefill is not None:
            self.prefill.release()
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
    # Requests that waited already.
    position: int


Place: TypeAlias = Ticket[Waiter]


class Dispatcher:
    """Use it from one event loop. `close` it when no request is left."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._clock = clock
        # Of what is left to chance; None: another each time.
        self._seed = seed
        self._fleet = Fleet(on_room=self._turn)
        # Those that only compute prompts. Nobody waits for them.
        self._prefill_fleet = Fleet()
        self._queue = AdmissionQueue[Waiter](_admission(snapshot.config))
        self._deserted_since_s: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._knowledge = Knowledge(snapshot.config.router.index_max_blocks)
        self.configure(snapshot)

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_waiting_by_class(self) -> dict[RequestClass, int]:
        return self._queue.num_waiting_by_class

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
    def knowledge(self) -> Knowledge:
        return self._knowledge

    @property
    def max_context_tokens(self) -> int | None:
        return self._fleet.max_context_tokens()

    def configure(self, snapshot: Snapshot) -> None:
        settings = snapshot.config.router
        self._generation = snapshot.generation
        self._knowledge.index.resize(settings.index_max_blocks)
        self._strategy = make_strategy(snapshot.config, self._knowledge, seed=self._seed)
        self._prefill_choice = PrefillChoice(settings, self._strategy)
        self._worker_wait_s = settings.worker_wait_s
        self._queue.configure(_admission(snapshot.config))
        self._turn()

    def update_workers(self, announced: Iterable[Announced]) -> None:
        everyone = tuple(announced)
        self._fleet.update(each for each in everyone if each.role is not Role.PREFILL)
        self._prefill_fleet.update(each for each in everyone if each.role is Role.PREFILL)
        self._knowledge.update_workers([*self._fleet.workers, *self._prefill_fleet.workers])
        self._turn()

    def update_stores(self, stores: Iterable[AnnouncedStore]) -> None:
        self._knowledge.update_stores(stores)

    def hear(self, holder_id: str, report: Report) -> bool:
        """What a worker or a store tells. False: something is missing; get a new snapshot."""
        return self._knowledge.hear(holder_id, report, self._clock())

    def deaf(self, holder_id: str) -> None:
        """Its reports have ended, for now."""
        self._knowledge.deaf(holder_id)

    def enter(
        self, request_class: RequestClass, *, tenant: str = "", remaining_s: float | None = None
    ) -> Place:
        """A place to hold as a context. `remaining_s`: until the request's deadline.

        Raises Overloaded when the queue is full, or the wait too long for the request.
        """
        now_s = self._clock()
        return self._queue.enter(
            request_class,
            now_s=now_s,
            room=lambda: self._fleet.room(now_s),
            tenant=tenant,
            remaining_s=remaining_s,
        )

    async def wait_for_worker(self, place: Place, prompt: Prompt) -> Grant:
        """Raises Unavailable when no worker has been there for router.worker_wait_s."""
        grant: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        waiter = Waiter(prompt, grant, self._queue.num_waiting)
        self._queue.join(place, waiter, self._clock())
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
        self._knowledge.check_idle()

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
            waiter = self._queue.grant(place, now_s)
            if waiter.grant.done():  # its request was cancelled, and has not run to its end yet
                continue
            waiter.grant.set_result(self._assign(candidates, waiter, granted_s, now_s))

    def _assign(
        self, candidates: list[Worker], waiter: Waiter, granted_s: float, now_s: float
    ) -> Grant:
        prompt = waiter.prompt
        choice = self._strategy.choose(candidates, prompt, now_s)
        slot = self._fleet.take(choice.worker, prompt.num_tokens)
        prefill = self._prefill_choice.choose(
            self._prefill_fleet.workers, choice.worker, prompt, now_s
        )
        prefill_slot = None
        if prefill is not None:
            prefill_slot = self._prefill_fleet.take(prefill.worker, prompt.num_tokens)
        errands = self._begin(choice, prefill, prompt, now_s)
        return Grant(
            *(slot, choice, prefill_slot, granted_s, self._generation, waiter.position),
            *(errands, self._clock),
        )

    def _begin(
        self, choice: Choice, prefill: Choice | None, prompt: Prompt, now_s: float
    ) -> tuple[Errand, ...]:
        if choice.predicted_tokens is None:
            return ()
        if prefill is None or prefill.predicted_tokens is None:
            return (self._knowledge.begin(choice, prompt, now_s),)
        # The decode worker gets the blocks, and the other one the work.
        taken = choice._replace(uncached_tokens=0, work_s=0.0)
        return (
            self._knowledge.begin(taken, prompt, now_s),
            self._knowledge.begin(prefill, prompt, now_s),
        )

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


def _admission(config: MeshConfig) -> AdmissionSettings:
    settings = config.router
    return AdmissionSettings(
        max_queue=settings.max_queue,
        ageing_s=settings.batch_ageing_s,
        max_wait_interactive_s=settings.max_wait_interactive_s,
        max_wait_batch_s=settings.max_wait_batch_s,
        weights={name: tenant.weight for name, tenant in config.tenants.items()},
    )


def _ids(fleet: Fleet) -> str:
    return ", ".join(worker.announced.id for worker in fleet.workers) or "none"

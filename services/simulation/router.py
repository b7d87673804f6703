"""A router without sockets: the real dispatcher, and a request's steps as router/journey.py takes
them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from router.admission import RequestClass
from router.checks import check_length
from router.dispatch import Dispatcher, Grant, Place
from router.prompt import Prompt
from services.core.config import Snapshot
from services.core.errors import MeshError, Unavailable
from services.core.keys import join_keys, root_key
from services.core.tokens import BYTES_PER_TOKEN
from services.core.workload import Arrival
from services.simulation.calls import Call, Fate, Prefix
from services.simulation.feeds import NO_TROUBLE, Hub, Line, Trouble
from services.simulation.store import VirtualStore
from services.simulation.worker import VirtualWorker


class Outcome(NamedTuple):
    """What became of a request. Times from its arrival on; NaN: it did not come so far."""

    arrival: Arrival
    ttft_s: float
    # Between two tokens of the answer, on average; 0 for an answer of one.
    tpot_s: float
    # The last that it ran at; empty: none.
    worker: str
    # At the worker that gave the first token: of the prompt, found in its cache.
    cached_tokens: int
    # What its router expected; None where the strategy does not ask.
    predicted_tokens: int | None
    attempts: int
    migrations: int
    # Empty, or the reason why it did not end well.
    error: str
    # On the clock of the workload.
    finished_s: float


class Timing(NamedTuple):
    """How long messages take, in seconds."""

    # Between router and worker, one way.
    hop_s: float = 0.0005
    # A report of blocks, from a worker to a router.
    report_s: float = 0.001
    # News of membership, to a router.
    membership_s: float = 0.01


class _Journey:
    """One request, and how far it has come."""

    def __init__(self, number: int, arrival: Arrival, prompt: Prompt, prefix: Prefix) -> None:
        self.number = number
        self.arrival = arrival
        self.prompt = prompt
        self.prefix = prefix
        self.began_s = asyncio.get_running_loop().time()
        self.first_s: float | None = None
        self.worker = ""
        self.cached_tokens = 0
        self.predicted_tokens: int | None = None
        self.num_attempts = 0
        self.num_migrations = 0
        self.num_answered = 0
        self.error = ""

    def outcome(self, now_s: float, start_s: float) -> Outcome:
        first_s = float("nan") if self.first_s is None else self.first_s
        return Outcome(
            arrival=self.arrival,
            ttft_s=first_s - self.began_s,
            tpot_s=(now_s - first_s) / max(1, self.num_answered - 1),
            worker=self.worker,
            cached_tokens=self.cached_tokens,
            predicted_tokens=self.predicted_tokens,
            attempts=self.num_attempts,
            migrations=self.num_migrations,
            error=self.error,
            finished_s=now_s - start_s,
        )


class _NotTaken(Exception):
    """A worker did not begin to answer, so another may."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class VirtualRouter:
    """Serves requests at virtual workers, by their address. Use it from a virtual loop."""

    def __init__(
        self,
        snapshot: Snapshot,
        workers: Mapping[str, VirtualWorker],
        timing: Timing,
        *,
        stores: Iterable[VirtualStore] = (),
        start_s: float,
        seed: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._timing = timing
        self._start_s = start_s
        self._settings = snapshot.config.router
        self._block_tokens = snapshot.config.mesh.block_tokens
        self._chance = random.Random(seed)
        self._lines: dict[str, Line] = {}
        self._trouble: dict[str, Trouble] = {}
        self._is_parted = False
        self._stores = tuple(stores)
        self.dispatcher = Dispatcher(snapshot, clock=self._loop.time, seed=seed)

    @property
    def lines(self) -> Mapping[str, Line]:
        """By the holder's name."""
        return self._lines

    # --- membership and reports

    def news(self) -> None:
        """Membership has changed; it takes a while to get here."""
        self._loop.call_later(self._timing.membership_s, self.learn)

    def learn(self) -> None:
        """What membership says by now."""
        if self._is_parted:
            return
        members = [worker for worker in self._workers.values() if worker.is_alive]
        self.dispatcher.update_workers(worker.announced for worker in members)
        self.dispatcher.update_stores(store.announced for store in self._stores)
        hubs = {each.name: each.hub for each in members}
        hubs |= {store.hub.holder_id: store.hub for store in self._stores}
        for name, line in [*self._lines.items()]:
            if hubs.get(name) is not line.hub:
                line.close()
                del self._lines[name]
        for name, hub in hubs.items():
            if name not in self._lines:
                self._lines[name] = self._listen(name, hub)

    def trouble(self, names: Iterable[str], trouble: Trouble) -> None:
        """What befalls the reports of these workers, from now on."""
        for name in names:
            self._trouble[name] = trouble
            if name in self._lines:
                self._lines[name].set_trouble(self._trouble_of(name))

    def part(self, parted: bool) -> None:
        """From reports and membership; the workers themselves can be called."""
        self._is_parted = parted
        for name, line in self._lines.items():
            line.set_trouble(self._trouble_of(name))
        if not parted:
            self.learn()

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines = {}
        self.dispatcher.close()

    def _listen(self, name: str, hub: Hub) -> Line:
        line = Line(hub, self.dispatcher, delay_s=self._timing.report_s, chance=self._chance)
        line.set_trouble(self._trouble_of(name))
        return line

    def _trouble_of(self, name: str) -> Trouble:
        trouble = self._trouble.get(name, NO_TROUBLE)
        return trouble._replace(cut=True) if self._is_parted else trouble

    # --- requests

    async def serve(self, number: int, arrival: Arrival) -> Outcome:
        """From its arrival to its end, whatever that is."""
        prefix = Prefix(number, arrival, self._block_tokens)
        prompt = Prompt(
            token_ids=_ids(number, arrival),
            prefix_keys=join_keys([self._root(arrival.tenant), *prefix.keys]),
            block_tokens=self._block_tokens,
        )
        journey = _Journey(number, arrival, prompt, prefix)
        life_s = self._life_s(arrival)
        try:
            async with asyncio.timeout(life_s):
                with self.dispatcher.enter(
                    RequestClass(arrival.request_class),
                    tenant=arrival.tenant,
                    remaining_s=life_s,
                ) as place:
                    self._check_length(prompt.num_tokens)
                    await self._generate(place, journey)
        except MeshError as error:
            journey.error = error.reason
        except _NotTaken as refusal:
            journey.error = refusal.reason
        except TimeoutError:
            journey.error = "DEADLINE_EXCEEDED"
        return journey.outcome(self._loop.time(), self._start_s)

    def _check_length(self, num_tokens: int) -> None:
        """Raises InvalidArgument for a prompt that no worker could take."""
        most = self.dispatcher.max_context_tokens
        if most is not None:
            check_length("token_ids", num_tokens, most)

    def _life_s(self, arrival: Arrival) -> float:
        most_s = self._settings.max_deadline_s
        return most_s if arrival.deadline_s is None else min(arrival.deadline_s, most_s)

    def _root(self, tenant: str) -> bytes:
        return root_key(model="virtual", block_tokens=self._block_tokens, tenant=tenant)

    async def _generate(self, place: Place, journey: _Journey) -> None:
        while not await self._answer_somewhere(place, journey):
            if journey.num_migrations == self._settings.max_migrations:
                raise Unavailable("its worker died once too often", reason="WORKER_DIED")
            journey.num_migrations += 1

    async def _answer_somewhere(self, place: Place, journey: _Journey) -> bool:
        """False: its worker died when the answer had begun."""
        for attempt in itertools.count(1):
            with await self.dispatcher.wait_for_worker(place, journey.prompt) as grant:
                if journey.first_s is None:
                    journey.num_attempts = attempt
                try:
                    return await self._call_worker(grant, journey)
                except _NotTaken:
                    if attempt >= self._settings.max_attempts:
                        raise
        raise AssertionError("it counts without end")

    async def _call_worker(self, grant: Grant, journey: _Journey) -> bool:
        announced = grant.slot.worker.announced
        worker = self._workers[announced.address]
        journey.worker = worker.name
        prefill = self._workers[grant.prefill_address] if grant.prefill else None
        call = self._call(worker, prefill, journey)
        hop_s = self._timing.hop_s
        self._loop.call_later(hop_s, worker.submit, call)
        try:
            await call.first
            self._check_taken(grant, call, journey)
            self.dispatcher.answered(grant.slot.worker)
            grant.first_token()
            if journey.first_s is None:
                journey.first_s = self._loop.time()
                journey.cached_tokens = call.cached_tokens
                journey.predicted_tokens = grant.choice.predicted_tokens
            await call.ended
        finally:
            if call.fate is Fate.OPEN:
                self._loop.call_later(hop_s, worker.cancel, call)
        journey.num_answered = call.num_answered
        if call.fate is Fate.LOST:
            self.dispatcher.failed(grant.slot.worker)
            return False
        self._learn(grant, call)
        return True

    def _learn(self, grant: Grant, call: Call) -> None:
        """From an answer that is whole."""
        grant.finished(
            cached_tokens=call.cached_tokens,
            evaluated_tokens=call.evaluated_tokens,
            loaded_blocks=call.loaded_blocks,
            load_s=call.load_s,
        )
        if grant.prefill is not None:
            if call.prefill_failed:
                self.dispatcher.prefill_failed(grant.prefill.worker)
            elif call.handed_off:
                self.dispatcher.prefilled(grant.prefill.worker)

    def _check_taken(self, grant: Grant, call: Call, journey: _Journey) -> None:
        """Raises _NotTaken when it has failed before its first token."""
        if call.fate is Fate.REFUSED:
            self.dispatcher.refused(grant.slot.worker)
            raise _NotTaken("WORKER_QUEUE_FULL")
        if call.fate is Fate.LOST and call.num_answered == journey.num_answered:
            self.dispatcher.failed(grant.slot.worker)
            raise _NotTaken("WORKER_DIED" if journey.num_answered else "WORKER_UNAVAILABLE")

    def _call(
        self, worker: VirtualWorker, prefill: VirtualWorker | None, journey: _Journey
    ) -> Call:
        arrival = journey.arrival
        room = worker.info.max_context_tokens - arrival.prompt_tokens
        return Call(
            journey.prefix,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=min(arrival.output_tokens, room),
            batch_class=arrival.request_class == RequestClass.BATCH.value,
            num_answered=journey.num_answered,
            prefill=prefill,
        )


def _ids(number: int, arrival: Arrival) -> bytes:
    """Stand for a prompt's ids: those that begin alike have blocks in common."""
    num_bytes = arrival.prompt_tokens * BYTES_PER_TOKEN
    head = arrival.chain[0] if arrival.chain else number.to_bytes(8, "little")
    return head[:num_bytes].ljust(num_bytes, b"\0")

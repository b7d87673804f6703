"""What an observer would have seen of a virtual mesh: a Window, and what its prompts tell.

Real routers' and workers' cores under virtual time; each step of each engine is noted as it
ends. A load and a plan with a fault in it give a window for the doctor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from router.dispatch import Grant
from services.core import attributes
from services.core.config import flatten
from services.core.ledger import Segment
from services.core.workload import Arrival
from services.observer.doctor.clues import Visit, lost_tokens
from services.observer.doctor.finding import Clues
from services.observer.doctor.readings import (
    BLOCKS_CACHED,
    BLOCKS_RESERVED,
    BLOCKS_TOTAL,
    ENGINE_BUSY,
)
from services.observer.model import Generation, Hop, Member, Reading, Request, Window
from services.simulation.calls import Call, Fate, Prefix
from services.simulation.clock import run
from services.simulation.core import VirtualCore
from services.simulation.lanes import Lane
from services.simulation.mesh import MeshPlan, VirtualMesh
from services.simulation.router import Outcome, VirtualRouter, _Journey
from services.simulation.worker import VirtualWorker
from worker.sequence import Sequence as Running

BEGIN_UNIX_S = 1_800_000_000.0
SAMPLE_S = 1.0


class Step(NamedTuple):
    """A part of a prompt in an engine step. Times on the loop's clock."""

    holder_id: str
    began_s: float
    ended_s: float
    num_sequences: int


@dataclass(slots=True)
class Trail:
    """What befell one request."""

    queue_s: float = 0.0
    granted: Grant | None = None
    best_elsewhere_tokens: int = 0
    queue_position: int = 0
    call: Call | None = None
    # By the call's prefix: where it came to, the last one counts.
    holder_id: str = ""
    prefill_id: str = ""
    steps: list[Step] = field(default_factory=list)


class Seen(NamedTuple):
    window: Window
    clues: Clues


class WatchedCore(VirtualCore):
    trails: dict[Prefix, Trail]

    def submit(self, call: Call) -> None:
        trail = self.trails[call.prefix]
        if call.export_from is None:
            trail.holder_id = self.hub.holder_id
        else:
            trail.prefill_id = self.hub.holder_id
        super().submit(call)

    def _end(self, lane: Lane) -> None:
        run = lane.run
        assert run is not None
        for sequence, _ in run.planned:
            if sequence.prefilling:
                self._note(
                    sequence, Step(self.hub.holder_id, run.began_s, run.end_s, len(run.planned))
                )
        super()._end(lane)

    def _note(self, sequence: Running, step: Step) -> None:
        prefix = self._calls[sequence.request_id].prefix
        self.trails[prefix].steps.append(step)


class WatchedWorker(VirtualWorker):
    core_class = WatchedCore


class WatchedRouter(VirtualRouter):
    trails: dict[Prefix, Trail]
    by_number: dict[int, Trail]

    async def _generate(self, place: Any, journey: _Journey) -> None:
        trail = Trail(queue_position=self.dispatcher.num_waiting)
        self.trails[journey.prefix] = self.by_number[journey.number] = trail
        await super()._generate(place, journey)

    async def _call_worker(self, grant: Grant, journey: _Journey) -> bool:
        trail = self.by_number[journey.number]
        if journey.first_s is None:
            trail.queue_s = self._loop.time() - journey.began_s
            trail.granted = grant
            trail.best_elsewhere_tokens = grant.choice.best_elsewhere_tokens
        return await super()._call_worker(grant, journey)

    def _call(
        self, worker: VirtualWorker, prefill: VirtualWorker | None, journey: _Journey
    ) -> Call:
        call = super()._call(worker, prefill, journey)
        if journey.first_s is None:
            self.by_number[journey.number].call = call
        return call


class WatchedMesh(VirtualMesh):
    router_class = WatchedRouter
    worker_class = WatchedWorker

    def __init__(self, plan: MeshPlan) -> None:
        WatchedCore.trails = WatchedRouter.trails = {}
        WatchedRouter.by_number = {}
        super().__init__(plan)
        self.readings: list[Reading] = []
        # By address: since whose life, and how long it had been busy before that.
        self._lives: dict[str, tuple[str, float]] = {}
        self._timer = self._loop.call_soon(self._sample)

    def close(self) -> None:
        self._timer.cancel()
        super().close()

    def _sample(self) -> None:
        unix_s = BEGIN_UNIX_S + self.now_s
        for worker in self.workers:
            if worker.is_alive:
                self.readings += _sampled(worker, unix_s, self._busy_of(worker))
        self._timer = self._loop.call_later(SAMPLE_S, self._sample)

    def _busy_of(self, worker: VirtualWorker) -> float:
        """In this life: a process counts from its start."""
        total_s, holder_id = worker.totals.busy_s, worker.hub.holder_id
        life, before_s = self._lives.get(worker.address, ("", 0.0))
        if life != holder_id:
            before_s = total_s if life else 0.0
            self._lives[worker.address] = holder_id, before_s
        return total_s - before_s


def _sampled(worker: VirtualWorker, unix_s: float, busy_s: float) -> Iterable[Reading]:
    pool = worker.pool
    values = {
        ENGINE_BUSY: busy_s,
        BLOCKS_CACHED: pool.num_cached,
        BLOCKS_RESERVED: pool.num_reserved,
        BLOCKS_TOTAL: pool.num_blocks,
    }
    for name, value in values.items():
        yield Reading(unix_s, worker.hub.holder_id, "worker", name, (), float(value))


def observe(
    arrivals: Iterable[Arrival],
    plan: MeshPlan,
    *,
    warm_s: float = 0.0,
    generations: Sequence[Generation] = (),
) -> Seen:
    """Of what arrived from `warm_s` on."""
    return run(_observe(list(arrivals), plan, warm_s, tuple(generations)))


async def _observe(
    arrivals: list[Arrival], plan: MeshPlan, warm_s: float, generations: tuple[Generation, ...]
) -> Seen:
    mesh = WatchedMesh(plan)
    try:
        outcomes = await mesh.serve(arrivals)
        end_unix_s = BEGIN_UNIX_S + mesh.now_s
        members = tuple(_members(mesh))
    finally:
        mesh.close()
    trails = WatchedRouter.by_number
    requests = [
        _request(number, outcome, trails.get(number, Trail()), plan, mesh)
        for number, outcome in enumerate(outcomes)
    ]
    visits = list(_visits(requests, trails, plan))
    clues = lost_tokens(visits, alive={each.id for each in members})
    begin_unix_s = BEGIN_UNIX_S + warm_s
    window = Window(
        begin_unix_s=begin_unix_s,
        end_unix_s=end_unix_s,
        requests=tuple(each for each in requests if each.arrived_unix_s >= begin_unix_s),
        readings=tuple(each for each in mesh.readings if each.unix_s >= begin_unix_s),
        bubbles=(),
        members=members,
        generations=generations or (Generation(1, BEGIN_UNIX_S, {}),),
        config=flatten(plan.config),
    )
    return Seen(window, clues)


def _members(mesh: VirtualMesh) -> Iterable[Member]:
    for worker in mesh.workers:
        if worker.is_alive:
            detail = "" if worker.role.value == "both" else f"for {worker.role.value}"
            name = worker.hub.holder_id
            yield Member(name, "worker", "ready", worker.address, worker.name, 1, detail)
    for index in range(len(mesh.routers)):
        yield Member(f"router-{index}", "router", "ready", "", "", 1, "")


def _request(
    number: int, outcome: Outcome, trail: Trail, plan: MeshPlan, mesh: VirtualMesh
) -> Request:
    arrival, call = outcome.arrival, trail.call
    ttft_s = None if math.isnan(outcome.ttft_s) else outcome.ttft_s
    spent_s = _spent(outcome, trail, plan) if ttft_s is not None else {Segment.QUEUE: trail.queue_s}
    duration_s = outcome.finished_s - arrival.at_s
    output_tokens = call.num_answered if call is not None else 0
    choice = trail.granted.choice if trail.granted is not None else None
    trace_id = f"{number:032x}"
    config = plan.config
    loaded_tokens = (call.loaded_blocks if call else 0) * config.mesh.block_tokens
    store = mesh.stores[0].cost if mesh.stores else None
    request = Request(
        trace_id=trace_id,
        hops=(),
        arrived_unix_s=BEGIN_UNIX_S + arrival.at_s,
        ttft_s=ttft_s,
        duration_s=duration_s,
        spent_s=spent_s,
        residual_s=0.0 if ttft_s is None else ttft_s - sum(spent_s.values()),
        hidden_s={},
        handoff_s=0.0,
        tpot_s=outcome.tpot_s if output_tokens > 1 else None,
        model="virtual",
        tenant=arrival.tenant,
        request_class=arrival.request_class,
        generation=1,
        worker_id=trail.holder_id,
        engine="simulated",
        strategy=config.router.routing_strategy,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=outcome.cached_tokens,
        predicted_tokens=choice.predicted_tokens if choice else None,
        best_elsewhere_tokens=trail.best_elsewhere_tokens,
        loaded_blocks=call.loaded_blocks if call else 0,
        expected_load_s=store.latency_s + call.loaded_blocks * store.block_s
        if store and call and call.loaded_blocks
        else 0.0,
        expected_compute_s=loaded_tokens / config.worker.simulated.prefill_tokens_per_s,
        load_s=call.load_s if call else 0.0,
        handed_off=bool(call and call.handed_off),
        queue_position=trail.queue_position,
        batch_size=trail.steps[0].num_sequences if trail.steps else 0,
        attempts=outcome.attempts,
        migrations=outcome.migrations,
        drafted_tokens=0,
        accepted_tokens=0,
        error=outcome.error,
    )
    return dataclasses.replace(request, hops=tuple(_hops(request, trail)))


def _spent(outcome: Outcome, trail: Trail, plan: MeshPlan) -> dict[Segment, float]:
    call = trail.call
    assert call is not None
    who = trail.prefill_id if call.handed_off else trail.holder_id
    prefill_s = sum(step.ended_s - step.began_s for step in trail.steps if step.holder_id == who)
    hops = 4 if call.handed_off else 2
    spent_s = {
        Segment.QUEUE: trail.queue_s,
        Segment.KV_LOAD: call.load_s,
        Segment.PREFILL: prefill_s,
        Segment.TRANSFER: hops * plan.timing.hop_s,
    }
    # Nothing else takes time in a virtual mesh.
    waited_s = outcome.ttft_s - sum(spent_s.values())
    return {**spent_s, Segment.PREFILL_QUEUE: max(0.0, waited_s)}


def _hops(request: Request, trail: Trail) -> Iterable[Hop]:
    if request.ttft_s is None:
        return
    names = [("worker.generate", "worker", trail.holder_id)]
    if request.handed_off:
        names.append(("worker.prefill", "worker", trail.prefill_id))
    sent_s = request.spent_s[Segment.QUEUE]
    for index, (name, service, member_id) in enumerate(names):
        yield Hop(
            name=name,
            service=service,
            member_id=member_id,
            host="",
            trace_id=request.trace_id,
            span_id=f"{index + 1:016x}",
            parent_span_id=f"{index:016x}" if index else "",
            tracestate="",
            sampled=True,
            arrived_unix_s=request.arrived_unix_s + sent_s,
            ended_s=request.duration_s - sent_s,
            first_token_s=request.ttft_s - sent_s,
            parts=(),
            spent_s=request.spent_s,
            hidden_s={},
            error="",
            attributes={attributes.KV_PREFILL_WORKER_ID: trail.prefill_id}
            if request.handed_off
            else {},
        )


def _visits(
    requests: Sequence[Request], trails: dict[int, Trail], plan: MeshPlan
) -> Iterable[Visit]:
    for number, request in enumerate(requests):
        trail = trails.get(number)
        if trail is None or trail.call is None or request.ttft_s is None:
            continue
        if trail.call.fate is Fate.FINISHED:
            yield Visit(
                request.trace_id,
                request.worker_id,
                request.arrived_unix_s,
                request.arrived_unix_s + request.ttft_s,
                request.cached_tokens,
                trail.call.prefix.keys,
                plan.config.mesh.block_tokens,
            )

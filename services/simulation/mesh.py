"""A mesh in one process, under virtual time: real routers' and workers' cores, no engine.

Only time is simulated. The same workload, plan and seed give the same result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from router.fleet import Role
from services.core.config import Snapshot
from services.core.settings import MeshConfig, WorkerSettings
from services.core.workload import Arrival
from services.simulation.clock import run
from services.simulation.core import Totals
from services.simulation.engine import engine_info
from services.simulation.faults import Fault, steps
from services.simulation.feeds import Trouble
from services.simulation.router import Outcome, Timing, VirtualRouter
from services.simulation.store import StorePlan, VirtualStore
from services.simulation.worker import VirtualWorker

# What is still on its way when the last request has ended arrives within this time.
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """`config`: as of a real mesh with the simulated engine. Blocks: `mesh.block_tokens` long."""

    config: MeshConfig
    # Those that answer. With prefill workers they are decode workers.
    num_workers: int
    num_prefill_workers: int = 0
    # None: blocks are in the workers alone.
    store: StorePlan | None = None
    num_routers: int = 1
    timing: Timing = field(default_factory=Timing)
    faults: tuple[Fault, ...] = ()
    seed: int = 0


class Replayed(NamedTuple):
    # In the order of arrivals.
    outcomes: list[Outcome]
    # By name.
    workers: dict[str, Totals]
    # From the start to the end of the last request, virtual.
    duration_s: float


def replay(arrivals: Iterable[Arrival], plan: MeshPlan) -> Replayed:
    """Send a workload, in the order of time, through a mesh that begins with empty caches.

    Raises ValueError when times go back.
    """
    return run(_replay(arrivals, plan))


async def _replay(arrivals: Iterable[Arrival], plan: MeshPlan) -> Replayed:
    mesh = VirtualMesh(plan)
    try:
        try:
            outcomes = await mesh.serve(arrivals)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        duration_s = mesh.now_s
        await asyncio.sleep(SETTLE_S + _longest_step_s(plan.config.worker))
        mesh.check_idle()
    finally:
        mesh.close()
    return Replayed(outcomes, mesh.totals, duration_s)


def _longest_step_s(settings: WorkerSettings) -> float:
    """A step that has begun ends, also where everybody has given up its requests."""
    engine = settings.simulated
    decode_ms = engine.decode_step_ms + engine.decode_step_ms_per_seq * settings.num_slots
    return settings.max_batch_tokens / engine.prefill_tokens_per_s + decode_ms / 1e3


class VirtualMesh:
    """Use it in a virtual loop; it begins when it is made."""

    # Others note what they do.
    router_class = VirtualRouter
    worker_class = VirtualWorker

    def __init__(self, plan: MeshPlan) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self.stores: list[VirtualStore] = []
        self.workers = self._make_workers(plan)
        by_address = {worker.address: worker for worker in self.workers}
        snapshot = Snapshot(1, plan.config)
        self.routers = [
            self.router_class(
                snapshot,
                by_address,
                plan.timing,
                stores=self.stores,
                start_s=self._start_s,
                seed=plan.seed * 1_000 + index,
            )
            for index in range(plan.num_routers)
        ]
        for router in self.routers:
            router.learn()
        for at_s, step in steps(plan.faults):
            self._loop.call_at(self._start_s + at_s, step, self)

    def _make_workers(self, plan: MeshPlan) -> list[VirtualWorker]:
        """Those that answer first, then those that prefill: faults number them so."""
        role = Role.DECODE if plan.num_prefill_workers else Role.BOTH
        names = [(f"worker-{index}", role) for index in range(plan.num_workers)]
        names += [(f"prefill-{index}", Role.PREFILL) for index in range(plan.num_prefill_workers)]
        workers = []
        for index, (name, each) in enumerate(names):
            store = self._store_of(index, plan)
            worker = self.worker_class(
                name, plan.config, hop_s=plan.timing.hop_s, role=each, store=store
            )
            workers.append(worker)
        return workers

    def _store_of(self, index: int, plan: MeshPlan) -> VirtualStore | None:
        """Of the node on which this worker is."""
        if plan.store is None:
            return None
        node = index // plan.store.workers_per_node
        if node == len(self.stores):
            info = engine_info(plan.config)
            store = VirtualStore(f"node-{node}", plan.store, plan.config.kvstore, info)
            self.stores.append(store)
        return self.stores[node]

    @property
    def now_s(self) -> float:
        """Since the start."""
        return self._loop.time() - self._start_s

    @property
    def totals(self) -> dict[str, Totals]:
        return {worker.name: worker.totals for worker in self.workers}

    async def serve(self, arrivals: Iterable[Arrival]) -> list[Outcome]:
        """Each at its time, at the routers in turn. Returns when all have ended."""
        tasks: list[asyncio.Task[Outcome]] = []
        last_s = 0.0
        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(arrivals):
                if arrival.at_s < last_s:
                    raise ValueError(
                        f"request {number} comes at {arrival.at_s:g} s, before the one before it"
                        f" ({last_s:g} s): sort the workload by time"
                    )
                last_s = arrival.at_s
                if last_s > self.now_s:
                    await asyncio.sleep(last_s - self.now_s)
                router = self.routers[number % len(self.routers)]
                name = f"request {number}"
                tasks.append(group.create_task(router.serve(number, arrival), name=name))
        return [task.result() for task in tasks]

    def check_idle(self) -> None:
        """For when no request is left: every count is zero."""
        for router in self.routers:
            router.dispatcher.check_idle()
        for worker in self.workers:
            worker.check_idle()
        for store in self.stores:
            store.check_integrity()

    def close(self) -> None:
        for router in self.routers:
            router.close()

    # --- faults

    def die(self, worker: int) -> None:
        if self.workers[worker].is_alive:
            self.workers[worker].die()
            self._news()

    def live(self, worker: int) -> None:
        if not self.workers[worker].is_alive:
            self.workers[worker].live()
            self._news()

    def slow_down(self, worker: int, factor: float) -> None:
        self.workers[worker].slow_down(factor)

    def part(self, router: int, parted: bool) -> None:
        self.routers[router].part(parted)

    def trouble(
        self, routers: tuple[int, ...] | None, workers: tuple[int, ...] | None, trouble: Trouble
    ) -> None:
        numbers = range(len(self.workers)) if workers is None else workers
        names = [self.workers[number].name for number in numbers]
        for router in range(len(self.routers)) if routers is None else routers:
            self.routers[router].trouble(names, trouble)

    def _news(self) -> None:
        for router in self.routers:
            router.news()

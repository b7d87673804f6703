"""The ladder on the real engine: processes of this machine, an open loop of requests.

Two meshes take turns with the rungs: one whose workers do everything, and one in which a
worker computes prompts for another. All else is settings of a running mesh.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from firsttoken.client import Answer, MeshClient, MeshError
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.bench.ladder import (
    Headroom,
    Ladder,
    Result,
    Rung,
    Trait,
    compare,
    summarize,
)
from services.bench.ladder_load import LOAD_SHARE, Load
from services.bench.processes import list_members
from services.bench.settings import configure
from services.bench.workloads import token_ids
from services.core.config import parse
from services.core.settings import MeshConfig
from services.core.workload import Arrival
from services.runtime.channels import open_channel
from services.runtime.tasks import end_tasks

T = TypeVar("T")

NUM_WORKERS = 2
LOAD = Load(
    num_prefixes=4,
    prefix_tokens=512,
    zipf=0.5,
    suffix_tokens=64,
    output_tokens=16,
    batch_share=0.25,
)
# Fewer blocks than the prefixes have, for each worker. No Redis: L1 alone.
CONFIG: MeshConfig = parse({"worker": {"num_cache_blocks": 28}, "kvstore": {"local_redis_mb": 0}})
# To measure what the baseline can do, and to fill caches.
CLIENTS_PER_WORKER = 2
# Of the seconds of a rung.
CAPACITY_SHARE = 0.75


class Mesh(Protocol):
    """One that runs."""

    @property
    def router(self) -> str: ...
    @property
    def control(self) -> str: ...
    async def run_beside(self, work: Coroutine[Any, Any, T]) -> T: ...


# Starts one, with this many workers that answer, and this many that compute prompts for them.
OpenMesh: TypeAlias = Callable[[int, int], AbstractAsyncContextManager[Mesh]]
Tell: TypeAlias = Callable[[str], None]


class _Asked(NamedTuple):
    """A request as it is sent."""

    arrival: Arrival
    token_ids: Sequence[int]
    salt: str


class _Mixed(NamedTuple):
    """What was seen where all workers do everything."""

    capacity_per_s: float
    arrivals: list[Arrival]
    rows: list[dict[str, Any]]
    without_split: dict[str, Any] | None


async def measure(
    ladder: Ladder,
    open_mesh: OpenMesh,
    *,
    seconds: float,
    load: Load = LOAD,
    config: MeshConfig = CONFIG,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """`seconds`: of load on each rung. `config`: that of the meshes. `tell` hears how far
    it is."""
    split = [rung for rung in ladder.rungs if Trait.SPLIT in rung.traits]
    tell(f"starting {NUM_WORKERS} workers …")
    async with open_mesh(NUM_WORKERS, 0) as mesh, _open(mesh, load, tell) as bench:
        mixed = await mesh.run_beside(_measure_mixed(bench, ladder, load, seconds))
    rows = mixed.rows
    if split:
        tell("starting one worker that answers and one that computes prompts …")
        async with open_mesh(NUM_WORKERS - 1, 1) as mesh, _open(mesh, load, tell) as bench:
            rows += await mesh.run_beside(_measure_split(bench, split, mixed.arrivals))
    return {
        "benchmark": "ladder",
        "engine": config.worker.engine,
        "clock": "real",
        "seconds": seconds,
        "capacity_per_s": mixed.capacity_per_s,
        "rate_per_s": LOAD_SHARE * mixed.capacity_per_s,
        "requests": len(mixed.arrivals),
        "batch_requests": sum(each.request_class == "batch" for each in mixed.arrivals),
        "load": load.describe(),
        "mesh": {
            "workers": NUM_WORKERS,
            "prefill_workers": 1,
            "blocks_per_worker": config.worker.num_cache_blocks,
            "slots_per_worker": config.worker.num_slots,
            "store_mb_per_node": config.kvstore.capacity_mb,
        },
        **compare(rows, mixed.without_split),
    }


async def _measure_mixed(bench: _Bench, ladder: Ladder, load: Load, seconds: float) -> _Mixed:
    baseline = ladder.rungs[0]
    capacity_per_s = await bench.capacity(baseline, CAPACITY_SHARE * seconds)
    num_requests = max(1, round(LOAD_SHARE * capacity_per_s * seconds))
    arrivals = load.arrivals(num_requests=num_requests, seconds=seconds)
    rungs = [rung for rung in ladder.rungs if Trait.SPLIT not in rung.traits]
    rows = [await bench.measure(rung, arrivals) for rung in rungs]
    without_split = None
    if ladder.without_split is not None:
        without_split = await bench.measure(ladder.without_split, arrivals)
    return _Mixed(capacity_per_s, arrivals, rows, without_split)


async def _measure_split(
    bench: _Bench, rungs: Sequence[Rung], arrivals: Sequence[Arrival]
) -> list[dict[str, Any]]:
    return [await bench.measure(rung, arrivals) for rung in rungs]


@asynccontextmanager
async def _open(mesh: Mesh, load: Load, tell: Tell) -> AsyncIterator[_Bench]:
    async with MeshClient(mesh.router) as client, open_channel(mesh.control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        workers = await list_members(stub, control_pb2.MEMBER_ROLE_WORKER)
        bench = _Bench(client, mesh.control, load, tell, workers)
        watching = [asyncio.create_task(bench.watch(worker.address)) for worker in workers]
        try:
            yield bench
        finally:
            await end_tasks(watching)


class _Bench:
    """Sends requests to one mesh, and watches its workers."""

    def __init__(
        self,
        client: MeshClient,
        control: str,
        load: Load,
        tell: Tell,
        workers: Sequence[control_pb2.Member],
    ) -> None:
        self._client = client
        self._control = control
        self._load = load
        self._tell = tell
        self._num_slots = sum(worker.worker.num_slots for worker in workers)
        self._num_answering = sum(
            worker.worker.role != control_pb2.WORKER_ROLE_PREFILL for worker in workers
        )
        self._numbers = itertools.count()
        began_ns = time.time_ns()
        self._salts = (f"ladder {began_ns} {number}" for number in itertools.count())
        # By the worker's address, the newest.
        self._loads: dict[str, worker_pb2.Load] = {}
        self._headroom = Headroom()

    async def watch(self, address: str) -> None:
        """What it says of itself, ten times a second at most."""
        async with open_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            async for response in stub.Watch(worker_pb2.WatchRequest(load_only=True)):
                is_first = response.HasField("snapshot")
                self._loads[address] = response.snapshot.load if is_first else response.load
                self._see()

    def _see(self) -> None:
        loads = self._loads.values()
        self._headroom.see(
            held=sum(load.num_blocks_reserved for load in loads),
            occupied=sum(load.num_blocks_cached for load in loads),
            num_blocks=sum(load.num_blocks_total for load in loads),
            running=sum(load.num_running for load in loads),
            num_slots=self._num_slots,
        )

    async def capacity(self, baseline: Rung, seconds: float) -> float:
        """Requests a second of a closed loop, up to its last answer."""
        self._tell("what the baseline can do …")
        await configure(self._control, baseline.settings)
        began_s = time.perf_counter()
        until_s = began_s + seconds
        endless = itertools.cycle(self._load.each_prefix(1))
        arrivals = itertools.takewhile(lambda _: time.perf_counter() < until_s, endless)
        requests = self._ask(arrivals, baseline, next(self._salts))
        num_answers = await self._closed_loop(requests, baseline)
        return num_answers / (time.perf_counter() - began_s)

    async def measure(self, rung: Rung, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        self._tell(f"{rung.name} …")
        await configure(self._control, rung.settings)
        salt = next(self._salts)  # nothing that a rung before this one left is found
        if Trait.CACHE in rung.traits:
            prefixes = self._load.each_prefix(self._num_answering)
            await self._closed_loop(self._ask(prefixes, rung, salt), rung)
        requests = [*self._ask(arrivals, rung, salt)]
        self._headroom = Headroom()
        self._see()
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for asked in requests:
                wait_s = began_s + asked.arrival.at_s - time.perf_counter()
                await asyncio.sleep(max(0.0, wait_s))
                tasks.append(group.create_task(self._send(asked, rung)))
        duration_s = time.perf_counter() - began_s
        return summarize(rung, [task.result() for task in tasks], duration_s, self._headroom)

    def _ask(self, arrivals: Iterable[Arrival], rung: Rung, salt: str) -> Iterator[_Asked]:
        """No two are equal; without a cache, no two can share."""
        for arrival in arrivals:
            number = next(self._numbers)
            ids = token_ids(arrival, number, self._load.block_tokens)
            own = "" if Trait.CACHE in rung.traits else f" {number}"
            yield _Asked(arrival, ids, salt + own)

    async def _closed_loop(self, requests: Iterator[_Asked], rung: Rung) -> int:
        """How many were answered: by some clients, each of which asks again at once.

        Raises MeshError for one that was not.
        """

        async def ask_on() -> int:
            num_answers = 0
            for asked in requests:
                await self._complete(asked, rung)
                num_answers += 1
            return num_answers

        clients = [ask_on() for _ in range(CLIENTS_PER_WORKER * NUM_WORKERS)]
        return sum(await asyncio.gather(*clients))

    async def _send(self, asked: _Asked, rung: Rung) -> Result:
        began_s = time.perf_counter()
        batch = asked.arrival.request_class == "batch"
        try:
            answer = await self._complete(asked, rung)
        except MeshError as error:
            nan = float("nan")
            reason = error.reason or error.code.name
            return Result(nan, nan, len(asked.token_ids), 0, 0, batch, reason)
        took_s, ttft_s = time.perf_counter() - began_s, answer.ttft_ms / 1e3
        usage = answer.usage
        return Result(
            ttft_s=ttft_s,
            tpot_s=(took_s - ttft_s) / max(1, usage.completion_tokens - 1),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            batch=batch,
            error="",
        )

    async def _complete(self, asked: _Asked, rung: Rung) -> Answer:
        says = Trait.CLASSES in rung.traits and asked.arrival.request_class == "batch"
        return await self._client.complete(
            asked.token_ids,
            max_tokens=asked.arrival.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            cache_salt=asked.salt,
            request_class="batch" if says else "interactive",
        )

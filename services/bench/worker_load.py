"""What a worker says of itself while a benchmark runs, and what became of that meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.runtime.channels import open_channel
from services.runtime.tasks import end_tasks

# A worker tells its load ten times a second at most.
SETTLED_S = 0.3


class Engine(NamedTuple):
    """An engine between two looks at its worker, in seconds.

    `bubble_s`: it had nothing to do, and there was work for it; by what held the work.
    """

    num_steps: int
    busy_s: float
    bubble_s: dict[str, float]

    @classmethod
    def between(cls, before: worker_pb2.Load, after: worker_pb2.Load) -> Engine:
        stages = {
            stage: held_s - before.bubble_s.get(stage, 0.0)
            for stage, held_s in after.bubble_s.items()
        }
        return cls(
            after.num_steps - before.num_steps,
            after.engine_busy_s - before.engine_busy_s,
            {stage: held_s for stage, held_s in stages.items() if held_s > 0},
        )

    def describe(self) -> dict[str, Any]:
        bubble_s, num_steps = sum(self.bubble_s.values()), max(1, self.num_steps)
        return {
            "steps": self.num_steps,
            "step_ms": self.busy_s / num_steps * 1e3,
            "bubble_ms_per_step": bubble_s / num_steps * 1e3,
            "bubble_share": bubble_s / (self.busy_s + bubble_s or 1.0),
            "bubble_ms": {stage: held_s * 1e3 for stage, held_s in self.bubble_s.items()},
        }


class LoadWatch:
    """The latest word of a worker; `fresh` waits for the next, which only a busy one has."""

    def __init__(self) -> None:
        self._load: worker_pb2.Load | None = None
        self._came = asyncio.Condition()

    async def fresh(self) -> worker_pb2.Load:
        async with self._came:
            await self._came.wait()
            assert self._load is not None
            return self._load

    async def settled(self) -> worker_pb2.Load:
        """When it has had the time to say what it has to."""
        await asyncio.sleep(SETTLED_S)
        async with self._came:
            await self._came.wait_for(lambda: self._load is not None)
            assert self._load is not None
            return self._load

    async def follow(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        async for response in stub.Watch(worker_pb2.WatchRequest(load_only=True)):
            which = response.WhichOneof("event")
            load = response.snapshot.load if which == "snapshot" else response.load
            async with self._came:
                self._load = load
                self._came.notify_all()


@asynccontextmanager
async def watch_load(address: str) -> AsyncIterator[LoadWatch]:
    watch = LoadWatch()
    async with open_channel(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        following = asyncio.create_task(watch.follow(stub))
        try:
            yield watch
        finally:
            await end_tasks([following])

"""A crowd at the real dispatcher, in virtual time: nobody waits whom a worker could take."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import random
from collections import Counter
from typing import Any

import pytest

from router.admission import RequestClass
from router.dispatch import Dispatcher, Grant
from router.fleet import FULL_PAUSE_S
from router.prompt import Prompt
from services.core import config
from services.core.config import Snapshot
from services.core.errors import Overloaded, Unavailable
from services.simulation.clock import run
from tests.router.fleets import announce

PROMPT = Prompt(bytes(4 * 200), bytes(32 * 4), 64)
STEPS = ("arrive", "end", "cancel", "members", "wait")
MIXES = ((40, 30, 5, 1, 10), (30, 25, 25, 5, 20), (50, 20, 2, 1, 5), (20, 30, 10, 20, 30))


class End(enum.Enum):
    """How a request's time at a worker ends."""

    ANSWERED = "answered"
    FAILED = "failed"
    REFUSED = "refused"


class Crowd:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(self.snapshot(1), clock=loop.time)
        self.slots: dict[str, int] = {}
        # Requests that each worker holds, by this test's own count.
        self.held: Counter[str] = Counter()
        # Until when a worker that refused, or that failed and has not answered since, may be
        # left alone.
        self.doubted_until_s: dict[str, float] = {}
        self.at_work: dict[asyncio.Task[None], asyncio.Future[End]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.seen: Counter[str] = Counter()

    def snapshot(self, generation: int) -> Snapshot:
        router: dict[str, Any] = {
            "routing_strategy": self.rng.choice(["kv_aware", "prefix_aware", "round_robin"]),
            "max_queue": self.rng.choice([2, 20, 1000]),
            "batch_ageing_s": self.rng.choice([0, 0.5, 5]),
            "max_wait_interactive_s": self.rng.choice([0, 1, 30]),
            "worker_wait_s": self.rng.choice([0, 1, 10]),
        }
        tenants = {"a": {"weight": self.rng.choice([0.5, 1, 4])}}
        return Snapshot(generation, config.parse({"router": router, "tenants": tenants}))

    async def run(self, num_steps: int) -> None:
        self.members()
        for step in self.rng.choices(STEPS, self.rng.choice(MIXES), k=num_steps):
            if step == "wait":
                await asyncio.sleep(self.rng.choice([0.01, 0.1, 0.7, 2.5]))
            elif step == "members":
                self.members()
            elif step == "arrive":
                task = asyncio.create_task(self.request())
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            elif step == "end" and self.at_work:
                future = self.rng.choice(list(self.at_work.values()))
                ends = [End.ANSWERED] * 8 + [End.FAILED, End.REFUSED]
                if not future.done():
                    future.set_result(self.rng.choice(ends))
            elif step == "cancel" and self.tasks:
                self.rng.choice(sorted(self.tasks, key=lambda task: task.get_name())).cancel()
            # Else several things happen at once.
            if self.rng.random() < 0.7:
                await self.settle()
        await self.end()

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)
        if not self.dispatcher.num_waiting:
            return
        self.seen["somebody waited"] += 1
        now_s = asyncio.get_running_loop().time()
        assert not any(worker.room(now_s) for worker in self.dispatcher.workers)
        for name, num_slots in self.slots.items():
            doubted = self.doubted_until_s.get(name, 0.0) > now_s
            assert doubted or self.held[name] >= num_slots

    def members(self) -> None:
        names = self.rng.sample("abcde", self.rng.randrange(6))
        self.slots = {name: self.rng.randint(1, 3) for name in names}
        ready = {name: self.rng.random() < 0.9 for name in names}
        self.dispatcher.update_workers(
            announce(name, num_slots=self.slots[name], ready=ready[name]) for name in names
        )
        self.slots = {name: count for name, count in self.slots.items() if ready[name]}
        if self.rng.random() < 0.3:
            self.dispatcher.configure(self.snapshot(2))

    async def request(self) -> None:
        request_class = self.rng.choice(list(RequestClass))
        remaining_s = self.rng.choice([None, 0.3, 5.0])
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(remaining_s):
                try:
                    place = self.dispatcher.enter(
                        request_class, tenant=self.rng.choice("aab"), remaining_s=remaining_s
                    )
                except Overloaded as refusal:
                    self.seen[refusal.reason] += 1
                    return
                with place:
                    await asyncio.sleep(self.rng.choice([0, 0, 0.02]))
                    for _ in range(3):
                        with await self.dispatcher.wait_for_worker(place, PROMPT) as grant:
                            if await self.work(grant) is End.ANSWERED:
                                return

    async def work(self, grant: Grant) -> End:
        name = grant.slot.worker.announced.id
        task = asyncio.current_task()
        assert task is not None
        self.held[name] += 1
        self.at_work[task] = asyncio.get_running_loop().create_future()
        try:
            end = await self.at_work[task]
        finally:
            del self.at_work[task]
            self.held[name] -= 1
        self.seen[end.value] += 1
        worker = grant.slot.worker
        now_s = asyncio.get_running_loop().time()
        if end is End.ANSWERED:
            if self.doubted_until_s.get(name) == math.inf:
                self.doubted_until_s[name] = now_s + FULL_PAUSE_S
            self.dispatcher.answered(worker)
        elif end is End.REFUSED:
            until_s = self.doubted_until_s.get(name, 0.0)
            self.doubted_until_s[name] = max(until_s, now_s + FULL_PAUSE_S)
            self.dispatcher.refused(worker)
        else:
            self.doubted_until_s[name] = math.inf
            self.dispatcher.failed(worker)
        return end

    async def end(self) -> None:
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.dispatcher.close()
        self.dispatcher.check_idle()


@pytest.mark.parametrize("batch", range(4))
def test_nobody_waits_whom_a_worker_could_take(batch: int) -> None:
    async def crowd(seed: int) -> Counter[str]:
        crowd = Crowd(seed)
        await crowd.run(num_steps=200)
        return crowd.seen

    seen: Counter[str] = Counter()
    for seed in range(batch * 50, batch * 50 + 50):
        try:
            seen += run(crowd(seed))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise

    reached = ("somebody waited", "answered", "failed", "refused", "QUEUE_FULL", "EXPECTED_WAIT")
    assert all(seen[each] > 10 for each in reached), seen

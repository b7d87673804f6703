"""Loading the blocks of one prompt out of the KV store, beside the request it is for.

First the blocks in node memory, then those in Redis, each part as planned: waited for
from the front, or brought from the tail while the engine computes from the head.
Whatever goes wrong ends the load; what has come is used, the rest is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from firsttoken.kvstore.v1 import kvstore_pb2
from services.core.errors import MeshError
from services.core.keys import storage_key
from services.core.settings import WorkerSettings
from services.runtime.tasks import end_tasks
from worker.chain_reader import Chain, ChainReader, LoadCounters, LoadFailed, Reading, Until
from worker.copying import Copier
from worker.deadline import Deadline
from worker.estimates import ReadCost, Tier
from worker.front import EngineFront
from worker.loading import Decision, EngineCost, Missing, Plan
from worker.planner import LoadPlanner
from worker.scheduler import StepBudget
from worker.store_client import Store, StoreClient
from worker.stream import TokenStream

# A load that takes as many times as long as expected, and this long, is thought over.
OVERDUE = 2.0
LEAST_OVERDUE_S = 0.05


class Means(NamedTuple):
    """What all loads of a worker share."""

    front: EngineFront
    client: StoreClient
    copier: Copier
    planner: LoadPlanner
    counters: LoadCounters


class ChainLoad:
    """One load, to be run once. `prefix_keys`: of the blocks that the prompt can use."""

    def __init__(
        self,
        means: Means,
        settings: WorkerSettings,
        store: Store,
        stream: TokenStream,
        prefix_keys: Sequence[bytes],
    ) -> None:
        self._front, self._client, copier, self._planner, self._counters = means
        self._settings = settings
        self._store = store
        self._stream = stream
        keys = [storage_key(key, self._front.info.fingerprint) for key in prefix_keys]
        self._chain = Chain(keys, prefix_keys)
        self._deadline = Deadline(settings.kv_load_timeout_ms / 1e3)
        self._reader = ChainReader(
            self._front, copier, self._counters, store, stream, self._chain, self._deadline
        )
        self._always = settings.kv_load == "always"
        self._began_s = time.monotonic()
        # Blocks from the front without a gap that are staged, or beyond.
        self._num_front = 0
        self._computing = False
        # When the request had its slot, and from when on the engine computed.
        self._slot_s = self._computing_s = math.inf
        self.plans: list[Plan] = []
        # That the store said it had, and the worker had not.
        self.num_missing = 0
        # Of those loaded, from the tail while the engine computed.
        self.num_from_tail = 0
        self.failure = ""

    @property
    def num_loaded(self) -> int:
        return self._reader.num_staged

    @property
    def load_s(self) -> float:
        """Until the last block was staged; 0 without one."""
        return self._reader.staged_s - self._began_s if self.num_loaded else 0.0

    @property
    def prefetch_s(self) -> float:
        """Of that, while the request queued."""
        return min(self.load_s, max(0.0, self._slot_s - self._began_s))

    @property
    def overlap_s(self) -> float:
        """Of that, while it had its slot and the engine computed."""
        return max(0.0, self.load_s - (max(self._slot_s, self._computing_s) - self._began_s))

    async def run(self) -> None:
        watcher = asyncio.create_task(self._watch_start(), name="wait for a slot")
        try:
            with self._store.use():
                async with self._deadline:
                    await self._load()
        except TimeoutError:
            self._fail("timeout")
        except LoadFailed as error:
            self._fail(str(error))
        except MeshError:
            self._fail("engine")
        except grpc.aio.AioRpcError as error:
            self._fail(error.code().name.lower())
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._client.suspect(self._store)
        finally:
            await end_tasks([watcher])
            self._reader.started()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._counters.failed[reason] += 1

    async def _watch_start(self) -> None:
        with contextlib.suppress(MeshError):
            await self._stream.started()
            self._slot_s = time.monotonic()
            self._reader.started()
            if not self._computing:
                self._deadline.hold()

    def _be_patient(self, start: int, num_blocks: int) -> None:
        """Hold the engine no longer than it would take to compute these blocks."""
        if not (self._always or self._computing):
            self._deadline.be_patient(self._compute_s(start, num_blocks))

    def _compute(self) -> None:
        """Do not hold the engine any longer."""
        if not self._computing:
            self._computing = True
            self._computing_s = time.monotonic()
            self._stream.compute()
            self._deadline.be_patient(math.inf)

    async def _load(self) -> None:
        start = self._num_held()
        self._be_patient(start, len(self._chain.prefix_keys) - start)
        found = await self._match()
        self.num_missing = max(0, found.num_all - start)
        self._be_patient(start, self.num_missing)
        reach = 0
        for tier, end in ((Tier.L1, found.num_l1), (Tier.L2, found.num_all)):
            await self._load_tier(tier, max(reach, self._num_held()), end)
            reach = end

    async def _match(self) -> kvstore_pb2.MatchResponse:
        try:
            # The store asks L2 for no longer than a share of this.
            found = await self._store.match(
                self._chain.storage_keys, timeout_s=self._deadline.left_s
            )
        except asyncio.CancelledError:
            if self._deadline.expired:
                self._client.suspect(self._store)
            raise
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._client.suspect(self._store)
                raise TimeoutError from None
            raise
        if found.l2_bytes_per_s:
            block_s = self._front.info.block_bytes / found.l2_bytes_per_s
            self._planner.read(Tier.L2).hint(ReadCost(found.l2_latency_ms / 1e3, block_s))
        return found

    async def _load_tier(self, tier: Tier, start: int, end: int) -> None:
        """Blocks start..end-1. After a probe, and when overdue, the rest is planned anew."""
        pace_s = 0.0
        while start < end:
            plan = self._plan(tier, start, end, pace_s)
            if plan.decision is Decision.LOAD:
                reading = await self._read(tier, range(start, start + plan.num_blocks), plan)
                start = self._num_front = start + reading.num_blocks
                overdue = reading.num_blocks < plan.num_blocks
                pace_s = reading.read_s / max(1, reading.num_blocks) if overdue else 0.0
                if overdue and plan.probe:
                    self.plans[-1] = plan._replace(superseded=True)
                done = not (overdue or plan.probe)
            else:
                self._compute()
                await self._read(tier, range(end - 1, end - 1 - plan.num_blocks, -1), plan)
                end -= plan.num_blocks
                start = max(start, self._num_held())
                done = plan.decision is Decision.COMPUTE or not plan.probe
            if done:
                return

    async def _read(self, tier: Tier, indices: Sequence[int], plan: Plan) -> Reading:
        reading = Reading()
        if not indices:
            return reading
        overdue_s = math.inf if self._computing else self._overdue_s(tier, plan)
        try:
            await self._reader.read(indices, reading, Until(self._computing, overdue_s))
        finally:
            self.num_from_tail += reading.num_blocks if self._computing else 0
            self._learn(tier, reading)
        return reading

    def _overdue_s(self, tier: Tier, plan: Plan) -> float:
        """After what time a read is no longer as planned."""
        cost = self._planner.read(tier).cost
        if self._always:
            return math.inf
        if cost is None:  # to learn it, no longer than computing the same takes
            return max(LEAST_OVERDUE_S, plan.expected.compute_s - plan.wait_s)
        return max(LEAST_OVERDUE_S, OVERDUE * cost.of(plan.num_blocks))

    def _learn(self, tier: Tier, reading: Reading) -> None:
        now_s, num_blocks = time.monotonic(), reading.num_blocks
        if not num_blocks:
            self._planner.read(tier).observe_wait(reading.read_s, now_s)
        elif not reading.num_from_l2:
            self._planner.read(Tier.L1).observe(
                num_blocks, reading.staged_s, now_s, latency_s=reading.answered_s
            )
        elif reading.num_from_l2 == num_blocks:
            # The first answer comes with a block: it does not tell the latency.
            self._planner.read(Tier.L2).observe(num_blocks, reading.staged_s, now_s)

    def _plan(self, tier: Tier, start: int, end: int, pace_s: float) -> Plan:
        """`pace_s`: what a block took in a read that is overdue, else 0."""
        missing = Missing(end - start, tier, self._room())
        engine = self._engine_cost(start, end)
        if self._always and not self._computing:
            plan = self._planner.plan_always(missing, engine)
        else:
            plan = self._planner.plan(missing, engine, time.monotonic(), least_block_s=pace_s)
        after_one_that_counts = bool(pace_s and not self.plans[-1].probe)
        self.plans.append(plan._replace(superseded=after_one_that_counts))
        return plan

    def _room(self) -> int:
        """A fair share of the inbox."""
        return max(1, self._front.inbox.num_slots // self._counters.num_running)

    def _num_held(self) -> int:
        """Blocks from the front that the engine has, or will find in its pool or the inbox."""
        pooled = self._stream.num_cached_blocks
        if pooled is None:
            pooled = self._front.hub.match(self._chain.prefix_keys)
        computed = self._stream.num_computed // self._front.info.block_tokens
        return max(pooled, computed, self._num_front)

    def _engine_cost(self, start: int, end: int) -> EngineCost:
        block_s = self._compute_s(start, end - start) / (end - start)
        if math.isinf(block_s):
            return EngineCost(0.0, 0.0, computing=self._computing)
        longest_s = self._settings.max_step_ms / 1e3 * StepBudget.HEADROOM
        num_most = self._settings.max_batch_tokens / self._front.info.block_tokens
        held = self._num_held()
        return EngineCost(
            compute_block_s=block_s,
            step_s=min(longest_s, num_most * block_s),
            wait_s=self._queue_wait_s() + self._compute_s(held, max(0, start - held)),
            computing=self._computing,
        )

    def _queue_wait_s(self) -> float:
        load = self._front.hub.load
        full = load.num_waiting > 0 or load.num_running >= self._front.info.num_slots
        queues = self._stream.num_cached_blocks is None
        return self._planner.queue_wait_s if queues and full else 0.0

    def _compute_s(self, start: int, num_blocks: int) -> float:
        """For blocks from `start` on; infinite while the engine has not been measured."""
        block_tokens = self._front.info.block_tokens
        known_s = self._planner.compute.of(start * block_tokens, num_blocks * block_tokens)
        if known_s is not None:
            return known_s
        rate = self._front.hub.load.prefill_tokens_per_s
        return num_blocks * block_tokens / rate if rate else math.inf

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
from types import TracebackType
from typing import NamedTuple, Self

import grpc

from firsttoken.kvstore.v1 import kvstore_pb2
from services.core.config import WorkerSettings
from services.core.errors import MeshError
from services.core.keys import storage_key
from services.runtime.tasks import end_tasks
from worker.chain_reader import Chain, ChainReader, LoadCounters, LoadFailed, Reading
from worker.copying import Copier
from worker.front import EngineFront
from worker.loading import Decision, EngineCost, LoadPlanner, Missing, Plan, ReadCost, Tier
from worker.scheduler import StepBudget
from worker.store_client import Store, StoreClient
from worker.stream import TokenStream


class Means(NamedTuple):
    """What all loads of a worker share."""

    front: EngineFront
    client: StoreClient
    copier: Copier
    planner: LoadPlanner
    counters: LoadCounters


class Deadline:
    """Ends a load after `timeout_s`, or when the engine has been held for `patience_s`.

    An async context manager like asyncio.timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        self.patience_s = math.inf
        self._held_since_s = math.inf
        self._latest_s = time.monotonic() + timeout_s
        self._scope = asyncio.timeout(timeout_s)
        self._open = False

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        await self._scope.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        return self._scope.expired()

    def be_patient(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._rearm()

    def hold(self) -> None:
        """The engine waits from now on."""
        self._held_since_s = time.monotonic()
        self._rearm()

    def _rearm(self) -> None:
        if self._open and not self.expired:
            until_s = min(self._latest_s, self._held_since_s + self.patience_s)
            left_s = until_s - time.monotonic()
            self._scope.reschedule(asyncio.get_running_loop().time() + left_s)


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
        self._reader = ChainReader(self._front, copier, self._counters, store, stream, self._chain)
        self._always = settings.kv_load == "always"
        self._began_s = time.monotonic()
        self._deadline = Deadline(settings.kv_load_timeout_ms / 1e3)
        # Blocks from the front without a gap that are staged, or beyond.
        self._num_front = 0
        self._computing = False
        self.plans: list[Plan] = []
        # That the store said it had, and the worker had not.
        self.num_missing = 0
        self.failure = ""

    @property
    def num_loaded(self) -> int:
        return self._reader.num_staged

    @property
    def load_s(self) -> float:
        """Until the last block was staged; 0 without one."""
        return self._reader.staged_s - self._began_s if self.num_loaded else 0.0

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
            self._reader.started()
            if not self._computing:
                self._deadline.hold()

    def _be_patient(self, num_blocks: int) -> None:
        """Hold the engine no longer than it would take to compute these blocks."""
        if not (self._always or self._computing):
            self._deadline.be_patient(self._compute_s(num_blocks))

    def _compute(self) -> None:
        """Do not hold the engine any longer."""
        if not self._computing:
            self._computing = True
            self._stream.compute()
            self._deadline.be_patient(math.inf)

    async def _load(self) -> None:
        start = self._num_held()
        self._be_patient(len(self._chain.prefix_keys) - start)
        found = await self._match()
        self.num_missing = max(0, found.num_all - start)
        self._be_patient(self.num_missing)
        reach = 0
        for tier, end in ((Tier.L1, found.num_l1), (Tier.L2, found.num_all)):
            await self._load_tier(tier, max(reach, self._num_held()), end)
            reach = end

    async def _match(self) -> kvstore_pb2.MatchResponse:
        try:
            found = await self._store.match(self._chain.storage_keys)
        except asyncio.CancelledError:
            if self._deadline.expired:
                self._client.suspect(self._store)
            raise
        if found.l2_bytes_per_s:
            block_s = self._front.info.block_bytes / found.l2_bytes_per_s
            self._planner.read(Tier.L2).hint(ReadCost(found.l2_latency_ms / 1e3, block_s))
        return found

    async def _load_tier(self, tier: Tier, start: int, end: int) -> None:
        """Blocks start..end-1. After a probe, the rest is planned anew."""
        while start < end:
            plan = self._plan(Missing(end - start, tier, self._room()), start)
            if plan.decision is Decision.LOAD:
                await self._read(tier, range(start, start + plan.num_blocks))
                start = self._num_front = start + plan.num_blocks
            else:
                self._compute()
                await self._read(tier, range(end - 1, end - 1 - plan.num_blocks, -1))
                end -= plan.num_blocks
                start = max(start, self._num_held())
            if plan.decision is Decision.COMPUTE or not plan.probe:
                return

    async def _read(self, tier: Tier, indices: Sequence[int]) -> None:
        if not indices:
            return
        reading = Reading()
        try:
            await self._reader.read(indices, reading, meeting=self._computing)
        finally:
            self._learn(tier, reading)

    def _learn(self, tier: Tier, reading: Reading) -> None:
        now_s = time.monotonic()
        if not reading.num_blocks:
            self._planner.read(tier).observe_wait(reading.read_s, now_s)
        elif reading.num_from_l2 in (0, reading.num_blocks):
            # Of blocks from both, nothing is learnt of either.
            of = Tier.L2 if reading.num_from_l2 else Tier.L1
            self._planner.read(of).observe(reading.num_blocks, reading.read_s, now_s)

    def _plan(self, missing: Missing, start: int) -> Plan:
        engine = self._engine_cost(start)
        if self._always and not self._computing:
            plan = self._planner.plan_always(missing, engine)
        else:
            plan = self._planner.plan(missing, engine, time.monotonic())
        self.plans.append(plan)
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

    def _engine_cost(self, start: int) -> EngineCost:
        block_s = self._compute_s(1)
        if math.isinf(block_s):
            return EngineCost(0.0, 0.0, computing=self._computing)
        load = self._front.hub.load
        rate = load.prefill_tokens_per_s
        longest_s = self._settings.max_step_ms / 1e3 * StepBudget.HEADROOM
        return EngineCost(
            compute_block_s=block_s,
            step_s=min(longest_s, self._settings.max_batch_tokens / rate),
            wait_s=self._queue_wait_s() + max(0, start - self._num_held()) * block_s,
            computing=self._computing,
        )

    def _queue_wait_s(self) -> float:
        load = self._front.hub.load
        full = load.num_waiting > 0 or load.num_running >= self._front.info.num_slots
        queues = self._stream.num_cached_blocks is None
        return self._planner.queue_wait_s if queues and full else 0.0

    def _compute_s(self, num_blocks: int) -> float:
        """Infinite while the engine has not been measured."""
        rate = self._front.hub.load.prefill_tokens_per_s
        return num_blocks * self._front.info.block_tokens / rate if rate else math.inf

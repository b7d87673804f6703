"""The worker's side of the KV store: blocks come out of it and go into it beside requests.

Nothing here can fail a request: what does not come in time is computed, what cannot
be written is dropped, and both are counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from services.core.config import Snapshot
from services.runtime.delays import inject
from services.runtime.logs import event
from services.runtime.membership import ControlClient
from services.runtime.resource import Resource
from services.runtime.tasks import end_tasks
from worker.chain_load import ChainLoad, Means
from worker.chain_reader import LoadCounters
from worker.chains import Chains
from worker.copying import Copier
from worker.estimates import ReadCost, Tier
from worker.front import EngineFront
from worker.loading import Decision
from worker.messages import FirstTokenTimes
from worker.planner import LoadPlanner
from worker.store_client import StoreClient
from worker.stream import TokenStream
from worker.write_behind import WriteBehind

# Blocks whose chain is remembered, for each block that the pool can hold.
CHAINS_PER_BLOCK = 4

logger = logging.getLogger(__name__)


class KvLoad(NamedTuple):
    """What became of a load. An expected time of 0 is unknown."""

    decision: Decision = Decision.COMPUTE
    reason: str = ""
    # Blocks that the store had and the worker had not, and those that came.
    missing_blocks: int = 0
    loaded_blocks: int = 0
    # Of those that came, from the tail while the engine computed.
    tail_blocks: int = 0
    expected_load_ms: float = 0.0
    expected_compute_ms: float = 0.0
    # Until the last block lay in the inbox.
    load_ms: float = 0.0
    # Of that, while the request queued, and while the engine computed.
    prefetch_s: float = 0.0
    overlap_s: float = 0.0
    # The best estimate of the ways not taken.
    best_other_s: float = 0.0


class TierStats(NamedTuple):
    """Counts since the start, but for those in flight: `num_loads`, `num_slots`, `num_writing`."""

    num_loads: int
    num_slots: int
    num_writing: int
    blocks_loaded: int
    blocks_loaded_from_l2: int
    blocks_stored: int
    blocks_present: int
    # By reason: blocks not written; blocks that did not verify; loads that ended early.
    dropped: Counter[str]
    rejected: Counter[str]
    failed: Counter[str]
    num_compute: int
    num_load: int
    num_both: int
    num_probes: int
    regret_ms: float
    # Of all requests for which there was something to decide.
    spent_ms: float


class KvTier(Resource):
    """An async context manager; enter it after the front and leave it before."""

    def __init__(self, front: EngineFront, control: ControlClient) -> None:
        self._front = front
        self._control = control
        self._settings = control.snapshot.config.worker
        self._planner = LoadPlanner()
        self._counters = LoadCounters()

    async def _open(self, stack: AsyncExitStack) -> None:
        info = self._front.info
        copier = await stack.enter_async_context(Copier())
        self._client = await stack.enter_async_context(
            StoreClient(self._control, block_bytes=info.block_bytes)
        )
        self._chains = Chains(CHAINS_PER_BLOCK * info.num_blocks)
        self._writer = WriteBehind(self._front, self._client, copier, self._chains)
        self._means = Means(self._front, self._client, copier, self._planner, self._counters)
        self._control.on_config(self._configure)
        self._front.on_stored(self._writer.offer)
        writing = asyncio.create_task(self._writer.run(), name="write behind")
        stack.push_async_callback(end_tasks, [writing])

    def may_load(self, num_tokens: int, prefix_keys: Sequence[bytes]) -> bool:
        """Whether a load could bring anything: if so, submit the request to be held for it."""
        usable = self._usable(num_tokens, prefix_keys)
        return not self._absence() and self._front.hub.match(usable) < len(usable)

    async def load(
        self,
        stream: TokenStream,
        num_tokens: int,
        prefix_keys: Sequence[bytes],
        *,
        tenant: str = "",
        on_outcome: Callable[[KvLoad], None],
    ) -> None:
        """Run it as a task beside the request, and cancel it with the request.

        `prefix_keys`: the root, then a key for each full block of the `num_tokens` that
        are to be computed. The engine is held until the load decides otherwise.
        `on_outcome` is called when it is over, or cancelled.
        """
        self._chains.add(prefix_keys[1:], tenant)
        self._counters.num_running += 1
        try:
            await self._load(stream, self._usable(num_tokens, prefix_keys), on_outcome)
        finally:
            self._counters.num_running -= 1
            stream.loading_ended()

    def expect(self, prefix_keys: Sequence[bytes], *, tenant: str = "") -> None:
        """For a request without a load: whose the blocks are that it will bring into the pool."""
        self._chains.add(prefix_keys[1:], tenant)

    def write_s(
        self, prefix_keys: Sequence[bytes], *, cached_tokens: int, since_s: float, until_s: float
    ) -> float:
        """How long blocks of this prompt were being written then, but for the cached ones."""
        first_index = cached_tokens // self._front.info.block_tokens
        return self._writer.recent.overlap_s(
            prefix_keys, first_index=first_index, since_s=since_s, until_s=until_s
        )

    def settle(self, load: KvLoad | None, first: FirstTokenTimes) -> float:
        """Learn from how a request went; the regret of its decision, in seconds."""
        load = load or KvLoad()
        block_tokens = self._front.info.block_tokens
        num_evaluated = first.evaluated_prompt_tokens
        if first.queue_s > 0:
            self._planner.observe_queue(first.queue_s)
        if num_evaluated >= block_tokens:
            start = first.cached_tokens - load.tail_blocks * block_tokens
            self._planner.compute.observe(max(0, start), num_evaluated, first.computing_s)
        if not load.missing_blocks:
            return 0.0
        if load.decision is Decision.LOAD and load.loaded_blocks == load.missing_blocks:
            rest_s = max(0.0, first.kv_load_s - load.load_ms / 1e3)
            self._planner.observe_import(load.loaded_blocks, rest_s)
        num_computed = (load.missing_blocks - load.loaded_blocks) * block_tokens
        share = min(num_computed, num_evaluated) / max(1, num_evaluated)
        actual_s = first.kv_load_s + share * first.computing_s
        regret_s = self._planner.tally.settle(load.best_other_s, actual_s)
        event(
            logger,
            logging.DEBUG,
            "kv load settled",
            decision=load.decision.value,
            reason=load.reason,
            missing_blocks=load.missing_blocks,
            loaded_blocks=load.loaded_blocks,
            expected_load_ms=round(load.expected_load_ms, 3),
            expected_compute_ms=round(load.expected_compute_ms, 3),
            actual_ms=round(actual_s * 1e3, 3),
            regret_ms=round(regret_s * 1e3, 3),
        )
        return regret_s

    @property
    def stats(self) -> TierStats:
        loads, writes, tally = self._counters, self._writer.counters, self._planner.tally
        return TierStats(
            num_loads=loads.num_running,
            num_slots=loads.num_slots,
            num_writing=writes.num_writing,
            blocks_loaded=loads.num_blocks,
            blocks_loaded_from_l2=loads.num_blocks_from_l2,
            blocks_stored=writes.num_stored,
            blocks_present=writes.num_present,
            dropped=writes.dropped.copy(),
            rejected=loads.rejected.copy(),
            failed=loads.failed.copy(),
            num_compute=tally.num_compute,
            num_load=tally.num_load,
            num_both=tally.num_both,
            num_probes=tally.num_probes,
            regret_ms=tally.regret_s * 1e3,
            spent_ms=tally.spent_s * 1e3,
        )

    @property
    def read_costs(self) -> dict[Tier, ReadCost]:
        """What reading from the store's tiers costs, as far as it is known."""
        costs = {tier: self._planner.read(tier).cost for tier in Tier}
        return {tier: cost for tier, cost in costs.items() if cost is not None}

    def _configure(self, snapshot: Snapshot) -> None:
        self._settings = snapshot.config.worker
        self._writer.configure(max_waiting=self._settings.kv_write_queue_blocks)

    def _usable(self, num_tokens: int, prefix_keys: Sequence[bytes]) -> Sequence[bytes]:
        """Of the full blocks all but the one that holds the last token: it is computed."""
        return prefix_keys[1:][: (num_tokens - 1) // self._front.info.block_tokens]

    def _absence(self) -> str:
        if self._settings.kv_load == "never":
            return "worker.kv_load is never"
        if not self._front.info.kv_readable:
            return "the engine's KV cannot be read or written"
        if self._client.store is not None:
            return ""
        return "the KV store does not answer" if self._client.hangs else "there is no KV store"

    async def _load(
        self, stream: TokenStream, usable: Sequence[bytes], on_outcome: Callable[[KvLoad], None]
    ) -> None:
        store = self._client.store
        absence = self._absence()
        if store is None or absence:
            on_outcome(KvLoad(reason=absence))
        elif self._front.hub.match(usable) == len(usable):
            on_outcome(KvLoad(reason="no block is missing"))
        else:
            await inject(self._control.snapshot.config.debug.delay_ms.worker_kv_match)
            load = ChainLoad(self._means, self._settings, store, stream, usable)
            try:
                await load.run()
            finally:
                on_outcome(_outcome(load))


def _outcome(load: ChainLoad) -> KvLoad:
    plans = load.plans
    counted = [plan for plan in plans if not plan.superseded]
    decisions = {plan.decision for plan in plans}
    decision = next(
        (way for way in (Decision.BOTH, Decision.LOAD) if way in decisions), Decision.COMPUTE
    )
    reasons = [plan.reason for plan in plans]
    if load.failure:
        reasons.append(f"ended after {load.num_loaded} blocks: {load.failure}")
    return KvLoad(
        decision=decision,
        reason="; ".join(reasons) or "no block of it is in the KV store",
        missing_blocks=load.num_missing,
        loaded_blocks=load.num_loaded,
        tail_blocks=load.num_from_tail,
        expected_load_ms=_sum_ms(plan.expected.load_s - plan.wait_s for plan in counted),
        expected_compute_ms=_sum_ms(plan.expected.compute_s - plan.wait_s for plan in counted),
        load_ms=load.load_s * 1e3,
        prefetch_s=load.prefetch_s,
        overlap_s=load.overlap_s,
        best_other_s=sum(plan.best_other_s for plan in counted),
    )


def _sum_ms(seconds: Iterable[float]) -> float:
    """Of those that are known."""
    return sum(value for value in seconds if math.isfinite(value)) * 1e3

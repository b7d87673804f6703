"""How KV comes to a virtual worker from elsewhere: a hand-off, or the store of its node.

As worker/sources.py: a hand-off where it pays, else a load where that is expected to take
less than computing. Loading and computing at once is not simulated.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.core.settings import WorkerSettings
from services.simulation.calls import Call, Fate
from services.simulation.store import VirtualStore
from worker.engines.contract import EngineInfo
from worker.estimates import Tier
from worker.handoff import HandoffCost
from worker.loading import Decision, EngineCost, Missing, decide
from worker.pool import NewBlock
from worker.sequence import Sequence


class Receiver(Protocol):
    """A worker, as far as KV comes to it. Its sequence is held until `compute`."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def prefill_tokens_per_s(self) -> float: ...

    def usable(self, sequence: Sequence) -> list[NewBlock]:
        """The full blocks before its last input token."""
        ...

    def take_first(self, sequence: Sequence, remote: Call) -> None:
        """Another worker has sampled its first token."""
        ...

    def take_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the next so many tokens has come."""
        ...

    def compute(self, sequence: Sequence) -> None:
        """No more comes: compute the rest, if there is one."""
        ...


class Bringing:
    """Of one worker. What it begins ends with the request, or with the worker."""

    def __init__(
        self,
        receiver: Receiver,
        settings: WorkerSettings,
        store: VirtualStore | None,
        *,
        hop_s: float,
    ) -> None:
        self._receiver = receiver
        self._settings = settings
        self._store = store if settings.kv_load != "never" else None
        self._hop_s = hop_s
        self._loop = asyncio.get_running_loop()
        self._cost = HandoffCost()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def may_bring(self, call: Call) -> bool:
        return call.prefill is not None or self._store is not None

    def begin(self, call: Call, sequence: Sequence) -> None:
        """It has its slot, and what the worker itself had."""
        if call.prefill is not None and self._pays(sequence):
            task = self._loop.create_task(self._hand_off(call, sequence))
        elif (plan := self._to_load(sequence)) is not None:
            task = self._loop.create_task(self._load(call, sequence, *plan))
        else:
            self._receiver.compute(sequence)
            return
        self._tasks[call.request_id] = task

    def end(self, call: Call) -> None:
        task = self._tasks.pop(call.request_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks = {}

    def _pays(self, sequence: Sequence) -> bool:
        threshold = self._settings.handoff_min_tokens or self._cost.threshold_tokens(
            prefill_tokens_per_s=self._receiver.prefill_tokens_per_s,
            block_tokens=self._receiver.info.block_tokens,
        )
        return sequence.num_input - sequence.num_computed >= threshold

    async def _hand_off(self, call: Call, sequence: Sequence) -> None:
        peer = call.prefill
        assert peer is not None
        remote = call.for_peer(sequence.num_computed)
        self._loop.call_later(self._hop_s, peer.submit, remote)
        try:
            await remote.first
            if remote.fate in (Fate.OPEN, Fate.FINISHED):
                call.handed_off = True
                first_s = self._loop.time()
                self._receiver.take_first(sequence, remote)
                await remote.ended
        finally:
            if remote.fate is Fate.OPEN:
                self._loop.call_later(self._hop_s, peer.cancel, remote)
        if remote.fate is Fate.FINISHED:
            self._cost.observe(self._loop.time() - first_s)
            self._receiver.take_tokens(sequence, sequence.num_input - sequence.num_computed)
        else:
            call.prefill_failed = True
        self._receiver.compute(sequence)

    def _to_load(self, sequence: Sequence) -> tuple[list[NewBlock], int] | None:
        """Blocks of the store from its start, and the first of them that is missing here."""
        if self._store is None:
            return None
        info, rate = self._receiver.info, self._receiver.prefill_tokens_per_s
        chain = self._receiver.usable(sequence)
        first = sequence.num_computed // info.block_tokens
        chain = chain[: self._store.match(chain)]
        if len(chain) <= first:
            return None
        room = self._settings.num_inbox_blocks
        engine = EngineCost(
            compute_block_s=info.block_tokens / rate,
            step_s=self._settings.max_batch_tokens / rate,
        )
        missing = Missing(len(chain) - first, Tier.L1, room)
        plan = decide(missing, self._store.cost, engine)
        always = self._settings.kv_load == "always"
        loads = plan.decision is Decision.LOAD or plan.expected.load_s < plan.expected.compute_s
        return (chain, first) if loads or always else None

    async def _load(
        self, call: Call, sequence: Sequence, chain: list[NewBlock], first: int
    ) -> None:
        assert self._store is not None
        began_s = self._loop.time()
        await asyncio.sleep(self._store.read(chain, first) - began_s)
        call.loaded_blocks = len(chain) - first
        call.load_s = self._loop.time() - began_s
        self._receiver.take_tokens(sequence, call.loaded_blocks * self._receiver.info.block_tokens)
        self._receiver.compute(sequence)

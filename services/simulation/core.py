"""A worker's core without an engine, a socket or a clock of its own, for one life.

Which request runs when, what is cached and what is evicted, the worker's own scheduler,
prefix cache and step budget decide; how long a step lasts, the simulated engine's timing
model. While nothing but answers run, it leaps to the first that ends, or to what comes
before that: a request, a cancel, a fault.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import numpy as np

from router.reports import LoadEvent
from services.core.sampling import Sampling
from services.core.settings import MeshConfig
from services.simulation.bringing import Bringing
from services.simulation.calls import Call, Fate, blank_ids
from services.simulation.engine import engine_info, measured_budget
from services.simulation.feeds import Hub
from services.simulation.lanes import Lane, Run, left
from services.simulation.store import VirtualStore
from worker.engines.simulated import step_s
from worker.messages import Source, Submit
from worker.pool import BlockPool, NewBlock
from worker.prefix_cache import PrefixCache
from worker.scheduler import Planned, Scheduler
from worker.sequence import Sequence
from worker.steps import BESIDE, TOGETHER

# The estimate of a step's length, a running mean, no longer moves after so many equal ones.
MOST_OBSERVATIONS = 32


@dataclass(slots=True)
class Totals:
    """Since the beginning, whatever died meanwhile."""

    num_requests: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    answer_tokens: int = 0


class VirtualCore:
    """Use it from a virtual loop, until `stop`. `hop_s`: to whoever called."""

    def __init__(
        self,
        config: MeshConfig,
        totals: Totals,
        *,
        holder_id: str,
        store: VirtualStore | None,
        hop_s: float,
    ) -> None:
        self.info = engine_info(config)
        self.slowness = 1.0
        self.hub = Hub(holder_id, f"life of {holder_id}", self._load)
        self._totals = totals
        self._store = store
        self._hop_s = hop_s
        self._timing = config.worker.simulated
        self._bytes_per_s = self._timing.transfer_gb_per_s * 1e9
        self._loop = asyncio.get_running_loop()
        self._pool = BlockPool(np.zeros((self.info.num_blocks, 1), np.uint8))
        self._cache = PrefixCache(self.info, self._pool, self._name)
        self._budget = measured_budget(config)
        self._scheduler = Scheduler(self.info, self._cache, self._budget)
        self._bringing = Bringing(self, config.worker, store, hop_s=hop_s)
        self._request_ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._cancelled: list[Call] = []
        kinds = BESIDE if self._timing.decode_overlap else TOGETHER
        self._lanes = [Lane(each) for each in kinds]
        self._awake: asyncio.Handle | None = None
        # When what is being copied is copied: no step begins before that.
        self._ready_s = 0.0
        self._busy_from_s = 0.0

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def pool(self) -> BlockPool:
        return self._pool

    def submit(self, call: Call) -> None:
        call.request_id = next(self._request_ids)
        call.submitted_s = self._loop.time()
        self._calls[call.request_id] = call
        self._scheduler.add(self._submit(call))
        for lane in self._lanes:
            if lane.kinds.prompts:
                self._cut(lane)
        self._wake()
        self.hub.load_changed()

    def cancel(self, call: Call) -> None:
        """One that is here, or was."""
        if self._calls.get(call.request_id) is call:
            self._cancelled.append(call)
            self._cut_all()
            self._wake()

    def slow_down(self, factor: float) -> None:
        """Steps that begin from now on last so many times as long."""
        self._cut_all()
        self.slowness = factor

    def stop(self) -> None:
        """All that run are lost."""
        self._count_answered()
        for lane in self._lanes:
            lane.clear()
        if self._awake is not None:
            self._awake.cancel()
        self._bringing.close()
        self.hub.close()
        for call in self._calls.values():
            self._tell(call, Fate.LOST)
        self._calls = {}

    def check_idle(self) -> None:
        """For when no request is left: every count is zero."""
        assert not self._calls, f"{self.hub.holder_id} still has {len(self._calls)} requests"
        assert all(lane.run is None for lane in self._lanes)
        assert self._scheduler.idle
        assert self._pool.num_reserved == 0
        self._scheduler.check_integrity()

    # --- what comes from elsewhere

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._budget.prefill_tokens_per_s

    def usable(self, sequence: Sequence) -> list[NewBlock]:
        num_blocks = (sequence.num_input - 1) // self.info.block_tokens
        return self._calls[sequence.request_id].prefix.blocks(0, num_blocks)

    def take_first(self, sequence: Sequence, remote: Call) -> None:
        call = self._calls[sequence.request_id]
        call.cached_tokens = remote.cached_tokens
        call.evaluated_tokens = remote.evaluated_tokens
        self._loop.call_later(self._hop_s, call.begin)
        sequence.answer.append(0)
        if not left(sequence, self.info):
            sequence.finished = True
            self._finish(sequence)
            self._wake()

    def take_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        self._copy(-(-num_tokens // self.info.block_tokens))
        sequence.num_computed += num_tokens
        sequence.num_cached += num_tokens

    def compute(self, sequence: Sequence) -> None:
        sequence.held = False
        self._cut_all()
        self._wake()

    # --- the loop: receive, schedule, run, publish

    def _wake(self) -> None:
        if self._awake is None and any(lane.run is None for lane in self._lanes):
            self._awake = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._awake = None
        self._release_cancelled()
        for sequence in self._scheduler.admit():
            if sequence.held:
                # Whoever brings its blocks must know which are here, and that there is room.
                self._start(sequence)
                self._bringing.begin(self._calls[sequence.request_id], sequence)
        for lane in self._lanes:
            if lane.run is None:
                self._begin(lane)

    def _begin(self, lane: Lane) -> None:
        decodes, prompts = lane.kinds
        planned = self._scheduler.plan(self._start, decodes=decodes, prompts=prompts)
        if not planned:
            return
        duration_s = step_s(self._timing, [item.work for item in planned]) * self.slowness
        began_s = max(self._loop.time(), self._ready_s)
        if all(each.run is None for each in self._lanes):
            self._busy_from_s = began_s
        self._set(lane, Run(planned, began_s, duration_s, self._num_steps(lane, planned)))

    def _set(self, lane: Lane, run: Run) -> None:
        lane.clear()
        lane.run = run
        lane.timer = self._loop.call_at(run.end_s, self._end, lane)

    def _num_steps(self, lane: Lane, planned: list[Planned]) -> int:
        """How many steps nothing changes in: to the first that ends, if all only answer."""
        if not lane.kinds.decodes:
            return 1
        running = self._scheduler.running()
        if lane.kinds.prompts and any(each.prefilling and not each.held for each in running):
            return 1
        return min(left(item.sequence, self.info) for item in planned)

    def _cut(self, lane: Lane) -> None:
        """Something has come: the step in progress is the last of its run."""
        run = lane.run
        if run is not None and run.num_steps > 1:
            self._set(lane, run.cut(self._loop.time()))

    def _cut_all(self) -> None:
        for lane in self._lanes:
            self._cut(lane)

    def _end(self, lane: Lane) -> None:
        run = lane.run
        assert run is not None
        lane.clear()
        self._count(run)
        first, ended = [], []
        for sequence, work in run.planned:
            if sequence.for_another:
                self._send(sequence, len(work.tokens))
            sequence.num_computed += len(work.tokens) + run.num_steps - 1
            if not work.wants_logits:
                continue
            if not sequence.has_first_token:
                first.append(sequence)
            sequence.answer += [0] * run.num_steps
            if sequence.for_another:
                self._hand_over(sequence)
            elif not left(sequence, self.info):
                sequence.finished = True
                ended.append(sequence)
        for sequence in first:
            self._tell_first(sequence)
        for sequence in self._scheduler.running():
            self._keep(sequence)
        for sequence in ended:
            self._finish(sequence)
        self._publish()
        if first:  # they answer from the next step on
            self._cut_all()
        self._turn()

    def _count(self, run: Run) -> None:
        num_prompt, num_decoding = run.num_prompt, run.num_decoding
        for sequence, work in run.planned:
            if sequence.prefilling:
                sequence.num_evaluated += len(work.tokens)
        for _ in range(min(run.num_steps, MOST_OBSERVATIONS)):
            self._budget.observe(
                num_prompt=num_prompt, num_decoding=num_decoding, step_s=run.step_s
            )
        self._totals.uncached_tokens += num_prompt
        self._totals.answer_tokens += num_decoding * run.num_steps
        self._count_busy()

    def _count_busy(self) -> None:
        """Until now, steps side by side once."""
        now_s = self._loop.time()
        self._totals.busy_s += max(0.0, now_s - self._busy_from_s)
        self._busy_from_s = max(now_s, self._busy_from_s)

    # --- requests

    def _submit(self, call: Call) -> Submit:
        return Submit(
            request_id=call.request_id,
            token_ids=blank_ids(call.prompt_tokens),
            prefix_keys=(b"", *call.prefix.keys),
            sampling=Sampling(max_tokens=call.output_tokens),
            batch_class=call.batch_class,
            submitted_s=call.submitted_s,
            answer_ids=(0,) * call.num_answered,
            source=Source.HOLD if self._bringing.may_bring(call) else Source.COMPUTE,
            export_from=call.export_from,
        )

    def _name(self, sequence: Sequence, num_blocks: int) -> None:
        prefix = self._calls[sequence.request_id].prefix
        sequence.chain += prefix.blocks(len(sequence.chain), num_blocks)

    def _start(self, sequence: Sequence) -> None:
        """Bring in what is cached of it, again where more has come since."""
        self._copy(len(self._cache.bring_in(sequence)))
        if not sequence.started:
            sequence.started_s = self._loop.time()
            self._totals.num_requests += 1
            self._totals.prompt_tokens += sequence.num_input
            if sequence.for_another:
                self._send(sequence, sequence.num_cached - (sequence.submit.export_from or 0))

    def _keep(self, sequence: Sequence, *, ending: bool = False) -> None:
        """Cache the full blocks that the pool lacks, once they are due."""
        if self._cache.due(sequence, ending=ending):
            self._copy(len(self._cache.keep(sequence).places))

    def _copy(self, num_blocks: int) -> None:
        """In or out of the engine, between its steps."""
        copying_s = num_blocks * self.info.block_bytes / self._bytes_per_s
        self._ready_s = max(self._ready_s, self._loop.time()) + copying_s

    def _tell_first(self, sequence: Sequence) -> None:
        call = self._calls[sequence.request_id]
        call.cached_tokens = sequence.num_cached
        call.evaluated_tokens = sequence.num_evaluated
        self._loop.call_later(self._hop_s, call.begin)

    def _send(self, sequence: Sequence, num_tokens: int) -> None:
        """To the worker that it is computed for, beside the steps, one after the other."""
        call = self._calls[sequence.request_id]
        sending_s = max(0, num_tokens) * self.info.token_bytes / self._bytes_per_s
        call.sent_s = max(call.sent_s, self._loop.time()) + sending_s

    def _hand_over(self, sequence: Sequence) -> None:
        """Its slot is free when the other worker has got all its KV."""
        sequence.finished = True
        call = self._calls[sequence.request_id]
        self._loop.call_at(call.sent_s, self._handed_over, call, sequence)

    def _handed_over(self, call: Call, sequence: Sequence) -> None:
        if self._calls.get(call.request_id) is call:
            self._finish(sequence)
            self._publish()
            self._wake()

    def _finish(self, sequence: Sequence) -> None:
        call = self._calls[sequence.request_id]
        call.num_answered = len(sequence.answer)
        self._release(call.request_id)
        self._tell(call, Fate.FINISHED)

    def _release(self, request_id: int) -> None:
        sequence = self._scheduler.find(request_id)
        assert sequence is not None
        if sequence.finished:
            self._keep(sequence, ending=True)
        self._scheduler.remove(request_id)
        self._bringing.end(self._calls.pop(request_id))
        self.hub.load_changed()

    def _release_cancelled(self) -> None:
        held = []
        for call in self._cancelled:
            if self._calls.get(call.request_id) is not call:
                continue  # it has ended meanwhile
            sequence = self._scheduler.find(call.request_id)
            if sequence is not None and any(lane.holds(sequence) for lane in self._lanes):
                held.append(call)
            else:
                self._release(call.request_id)
        self._cancelled = held

    def _tell(self, call: Call, fate: Fate) -> None:
        self._loop.call_later(self._hop_s, call.end, fate)

    def _count_answered(self) -> None:
        """What had left before the worker died."""
        now_s = self._loop.time()
        more: dict[Sequence, int] = {}
        for lane in self._lanes:
            if lane.run is not None:
                num_steps = lane.run.num_ended(now_s)
                more.update((item.sequence, num_steps) for item in lane.run.planned)
        if more:
            self._count_busy()
        for sequence in self._scheduler.running():
            num_more = more.get(sequence, 0) if sequence.has_first_token else 0
            call = self._calls[sequence.request_id]
            call.num_answered = len(sequence.answer) + num_more
            self._totals.answer_tokens += num_more

    # --- reports

    def _publish(self) -> None:
        events = self._pool.take_events()
        self.hub.publish((block.prefix_key for block in events.stored), events.evicted)
        if self._store is not None and events.stored:
            self._store.put(events.stored)
        self.hub.load_changed()

    def _load(self) -> LoadEvent:
        return LoadEvent(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            queued_prompt_tokens=self._scheduler.num_queued_tokens,
            prefill_tokens_per_s=self._budget.prefill_tokens_per_s,
            num_blocks_reserved=self._pool.num_reserved,
            num_blocks_total=self._pool.num_blocks,
            prompt_tokens_evaluated=self._totals.uncached_tokens,
        )

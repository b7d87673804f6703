"""A worker without an engine, a socket or a clock of its own.

Which request runs when, what is cached and what is evicted, the worker's own scheduler,
block pool and step budget decide; how long a step lasts, the simulated engine's timing
model. While nothing but answers run, it leaps to the first that ends, or to what comes
before that: a request, a cancel, a fault.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from router.fleet import Announced, Role
from router.reports import LoadEvent
from services.core.sampling import Sampling
from services.core.settings import MeshConfig
from services.simulation.calls import Call, Fate, blank_ids
from services.simulation.feeds import Hub
from worker.engines.contract import EngineInfo, Work
from worker.engines.simulated import step_s
from worker.messages import Submit
from worker.pool import BlockPool
from worker.prefix_cache import PrefixCache
from worker.scheduler import Planned, Scheduler, StepBudget
from worker.sequence import Sequence

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


class _Run(NamedTuple):
    """Steps that are in progress, all of the same length."""

    planned: list[Planned]
    began_s: float
    step_s: float
    num_steps: int


class VirtualWorker:
    """Use it from a virtual loop. It lives until `die`, and again after `live`."""

    def __init__(self, name: str, config: MeshConfig, *, hop_s: float, role: Role = Role.BOTH):
        self.name = name
        self.role = role
        self.totals = Totals()
        self.slowness = 1.0
        self.info = engine_info(config)
        self._config = config.worker
        self._timing = config.worker.simulated
        self._bytes_per_s = self._timing.transfer_gb_per_s * 1e9
        self._hop_s = hop_s
        self._loop = asyncio.get_running_loop()
        self._request_ids = itertools.count(1)
        self._lives = 0
        self.is_alive = False
        self.live()

    @property
    def announced(self) -> Announced:
        """As membership tells of it."""
        return Announced(
            id=self.hub.holder_id,
            address=f"{self.name}:7000",
            ready=self.is_alive,
            num_slots=self.info.num_slots,
            max_context_tokens=self.info.max_context_tokens,
            role=self.role,
            fingerprint=self.info.fingerprint.hex(),
            num_blocks=self.info.num_blocks,
        )

    def live(self) -> None:
        """Start, with an empty cache, as somebody else at the same address."""
        self._lives += 1
        self.is_alive = True
        self.hub = Hub(f"{self.name}-{self._lives}", f"life {self._lives}", self._load)
        self._pool = BlockPool(np.zeros((self.info.num_blocks, 1), np.uint8))
        self._cache = PrefixCache(self.info, self._pool, self._name)
        self._budget = StepBudget(
            max_step_s=self._config.max_step_ms / 1e3,
            max_batch_tokens=self._config.max_batch_tokens,
        )
        self._scheduler = Scheduler(self.info, self._cache, self._budget)
        self._warm_up()
        self._calls: dict[int, Call] = {}
        self._cancelled: list[Call] = []
        self._run: _Run | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        # Copying between the last step and the next.
        self._stall_s = 0.0

    def die(self) -> None:
        """All that run are lost. Who called hears it a hop later."""
        self._count_answered()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._run = None
        self.is_alive = False
        for call in self._calls.values():
            self._tell(call, Fate.LOST)
        self._calls = {}

    def slow_down(self, factor: float) -> None:
        """Steps that begin from now on last so many times as long."""
        if self.is_alive:
            self._interrupt()
        self.slowness = factor

    def submit(self, call: Call) -> None:
        """A request arrives."""
        if call.is_cancelled:
            return
        if not self.is_alive:
            self._tell(call, Fate.LOST)
            return
        if len(self._calls) >= self.info.num_slots + self._config.max_waiting:
            self._tell(call, Fate.REFUSED)
            return
        call.request_id = next(self._request_ids)
        call.submitted_s = self._loop.time()
        self._calls[call.request_id] = call
        self._scheduler.add(self._submit(call))
        self._interrupt()
        self.hub.load_changed()

    def cancel(self, call: Call) -> None:
        """Its caller is gone."""
        call.is_cancelled = True
        if self._calls.get(call.request_id) is not call:
            return
        self._cancelled.append(call)
        self._interrupt()

    def check_idle(self) -> None:
        """For when no request is left: every count is zero."""
        assert not self._calls, f"{self.name} still has {len(self._calls)} requests"
        if self.is_alive:
            assert self._run is None
            assert self._scheduler.idle
            self._scheduler.check_integrity()
            assert self._pool.num_reserved == 0

    def _warm_up(self) -> None:
        """A worker takes requests when it has measured itself."""
        for num_prompt, num_decoding in ((StepBudget.FIRST_TOKENS, 0), (0, 1)):
            prompt = [Work(0, 0, blank_ids(num_prompt), wants_logits=False)] * (num_prompt > 0)
            decoding = [Work(0, 0, blank_ids(1), wants_logits=True)] * num_decoding
            self._budget.observe(
                num_prompt=num_prompt,
                num_decoding=num_decoding,
                step_s=step_s(self._timing, prompt + decoding),
            )

    # --- the loop: receive, schedule, run, publish

    def _wake(self) -> None:
        if self._run is None and self._timer is None:
            self._timer = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._timer = None
        self._release_cancelled()
        self._scheduler.admit()
        planned = self._scheduler.plan(self._start)
        if not planned:
            return
        duration_s = step_s(self._timing, [item.work for item in planned]) * self.slowness
        began_s = self._loop.time() + self._stall_s
        self.totals.busy_s += self._stall_s
        self._stall_s = 0.0
        self._begin(_Run(planned, began_s, duration_s, self._num_steps(planned)))

    def _begin(self, run: _Run) -> None:
        self._run = run
        end_s = run.began_s + run.num_steps * run.step_s
        self._timer = self._loop.call_at(end_s, self._end)

    def _num_steps(self, planned: list[Planned]) -> int:
        """How many steps nothing changes in: to the first that ends, if all only answer."""
        if any(sequence.prefilling for sequence in self._scheduler.running()):
            return 1
        return min(_left(item.sequence, self.info) for item in planned)

    def _interrupt(self) -> None:
        """Something has come: the step in progress is the last of its run."""
        run = self._run
        if run is None:
            self._wake()
            return
        if run.num_steps == 1 or self._timer is None:
            return
        elapsed = (self._loop.time() - run.began_s) / run.step_s
        num_steps = min(max(1, math.ceil(elapsed - 1e-9)), run.num_steps)
        self._timer.cancel()
        self._begin(run._replace(num_steps=num_steps))

    def _end(self) -> None:
        run = self._run
        assert run is not None
        self._run = self._timer = None
        self._count(run)
        first, ended = [], []
        for sequence, work in run.planned:
            sequence.num_computed += len(work.tokens) + run.num_steps - 1
            if not work.wants_logits:
                continue
            if not sequence.has_first_token:
                first.append(sequence)
            sequence.answer += [0] * run.num_steps
            if not _left(sequence, self.info):
                sequence.finished = True
                ended.append(sequence)
        for sequence in first:
            self._tell_first(sequence)
        for sequence in self._scheduler.running():
            self._keep(sequence)
        for sequence in ended:
            self._finish(sequence)
        self._publish()
        self._turn()

    def _count(self, run: _Run) -> None:
        num_prompt = 0
        for sequence, work in run.planned:
            if sequence.prefilling:
                sequence.num_evaluated += len(work.tokens)
                num_prompt += len(work.tokens)
        num_decoding = sum(not item.sequence.prefilling for item in run.planned)
        for _ in range(min(run.num_steps, MOST_OBSERVATIONS)):
            self._budget.observe(
                num_prompt=num_prompt, num_decoding=num_decoding, step_s=run.step_s
            )
        self.totals.uncached_tokens += num_prompt
        self.totals.answer_tokens += num_decoding * run.num_steps
        self.totals.busy_s += run.step_s * run.num_steps

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
        )

    def _name(self, sequence: Sequence, num_blocks: int) -> None:
        prefix = self._calls[sequence.request_id].prefix
        sequence.chain += prefix.blocks(len(sequence.chain), num_blocks)

    def _start(self, sequence: Sequence) -> None:
        """Bring in what is cached of it, again where more has come since."""
        self._stall_s += self._copying_s(len(self._cache.bring_in(sequence)))
        if not sequence.started:
            sequence.started_s = self._loop.time()
            self.totals.num_requests += 1
            self.totals.prompt_tokens += sequence.num_input

    def _keep(self, sequence: Sequence, *, ending: bool = False) -> None:
        """Cache the full blocks that the pool lacks, once they are due."""
        if self._cache.due(sequence, ending=ending):
            self._stall_s += self._copying_s(len(self._cache.keep(sequence).places))

    def _copying_s(self, num_blocks: int) -> float:
        return num_blocks * self.info.block_bytes / self._bytes_per_s

    def _tell_first(self, sequence: Sequence) -> None:
        call = self._calls[sequence.request_id]
        call.cached_tokens = sequence.num_cached
        call.evaluated_tokens = sequence.num_evaluated
        self._loop.call_later(self._hop_s, call.begin)

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
        del self._calls[request_id]
        self.hub.load_changed()

    def _release_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for call in cancelled:
            if self._calls.get(call.request_id) is call:  # it may have ended meanwhile
                self._release(call.request_id)

    def _tell(self, call: Call, fate: Fate) -> None:
        self._loop.call_later(self._hop_s, call.end, fate)

    def _count_answered(self) -> None:
        """What had left before the worker died."""
        run = self._run
        num_steps = 0
        if run is not None:
            elapsed = max(0.0, self._loop.time() - run.began_s)
            num_steps = min(math.floor(elapsed / run.step_s + 1e-9), run.num_steps)
            self.totals.busy_s += elapsed
        for sequence in self._scheduler.running():
            num_more = num_steps if sequence.has_first_token else 0
            call = self._calls[sequence.request_id]
            call.num_answered = len(sequence.answer) + num_more
            self.totals.answer_tokens += num_more

    # --- reports

    def _publish(self) -> None:
        events = self._pool.take_events()
        self.hub.publish((block.prefix_key for block in events.stored), events.evicted)
        self.hub.load_changed()

    def _load(self) -> LoadEvent:
        return LoadEvent(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            queued_prompt_tokens=self._scheduler.num_queued_tokens,
            prefill_tokens_per_s=self._budget.prefill_tokens_per_s,
            num_blocks_reserved=self._pool.num_reserved,
            num_blocks_total=self._pool.num_blocks,
        )


def _left(sequence: Sequence, info: EngineInfo) -> int:
    """Tokens of the answer that are still to come."""
    total = len(sequence.submit.token_ids) + len(sequence.answer)
    most = (sequence.submit.sampling.max_tokens or 1) - len(sequence.answer)
    return min(most, info.max_context_tokens - total)


def engine_info(config: MeshConfig) -> EngineInfo:
    """As the simulated engine says of itself, without a model."""
    timing = config.worker.simulated
    block_tokens = config.mesh.block_tokens
    return EngineInfo(
        name="simulated",
        model="virtual",
        fingerprint=b"virtual",
        vocabulary_size=1,
        eos_token_ids=(),
        num_slots=config.worker.num_slots,
        max_context_tokens=min(config.worker.max_context_tokens, timing.num_blocks * block_tokens),
        block_tokens=block_tokens,
        block_bytes=block_tokens * timing.kv_bytes_per_token,
        num_blocks=timing.num_blocks,
        kv_in_pool=True,
    )

"""Which tokens go into the next engine step.

Pure: no clock, no engine, no I/O. Decoding sequences come first, one token each;
what the step's token budget leaves goes to prompts, first come first served,
interactive before batch. Prompts are cut into chunks, so a long one neither
holds up the tokens of others nor the cancelling of anything.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.core.tokens import TokenArray
from worker.engines.contract import EngineInfo, Work
from worker.messages import (
    Compute,
    FirstToken,
    LoadingEnded,
    MoreCredit,
    Source,
    StagedBlock,
    Submit,
)
from worker.pool import BlockPool

# A waiting batch request goes before interactive ones that came this much later.
BATCH_AGEING_S = 5.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the core, and how far it has come."""

    submit: Submit
    # The answer so far, what another worker gave of it included.
    answer: list[int] = field(default_factory=list)
    slot: int = -1
    num_reserved: int = 0
    # Tokens whose KV is in the slot, prompt and answer together.
    num_computed: int = 0
    num_cached: int = 0
    # Prompt tokens that went through the engine, counted as they go.
    num_evaluated: int = 0
    # Blocks that lie in the inbox, by their index.
    staged: dict[int, StagedBlock] = field(default_factory=dict)
    # Blocks are coming, and nothing is to be computed meanwhile.
    held: bool = False
    # More blocks may come.
    loading: bool = False
    # Join what is staged, however little: its slots are needed.
    flush: bool = False
    finished: bool = False
    # Engines move its KV, and nobody else may touch it.
    transferring: bool = False
    # The next block to export for another worker, and how many it has room for. What
    # lies in the outbox can always leave it: else two workers could wait for each other.
    export_next: int = 0
    export_credit: int = 0
    started_s: float = 0.0
    # Spent on bringing KV into the engine, or waiting for it with nothing else to do.
    kv_load_s: float = 0.0

    @classmethod
    def of(cls, submit: Submit) -> Sequence:
        return cls(
            submit,
            answer=list(submit.answer_ids),
            held=submit.source is Source.HOLD,
            loading=submit.source is not Source.COMPUTE,
            export_next=submit.export_from or 0,
            export_credit=submit.export_credit,
        )

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def input_ids(self) -> TokenArray:
        """What is to be computed before the first token that is sampled here."""
        if not self.submit.answer_ids:
            return self.submit.token_ids
        given = np.array(self.submit.answer_ids, dtype=np.uint32)
        return np.concatenate([self.submit.token_ids, given])

    @property
    def num_input(self) -> int:
        return len(self.submit.token_ids) + len(self.submit.answer_ids)

    @property
    def started(self) -> bool:
        return self.started_s > 0.0

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.num_input

    @property
    def num_answered(self) -> int:
        """Tokens of the answer that came since it was submitted."""
        return len(self.answer) - len(self.submit.answer_ids)

    @property
    def has_first_token(self) -> bool:
        return self.num_answered > 0

    @property
    def for_another(self) -> bool:
        return self.submit.export_from is not None

    def advise(self, command: Compute | LoadingEnded | FirstToken | MoreCredit) -> None:
        match command:
            case MoreCredit():
                self.export_credit += command.num_blocks
            case Compute():
                self.held = False
            case LoadingEnded():
                self.loading = False
            case FirstToken():
                self.answer.append(command.token_id)

    def wants(self, block: StagedBlock, block_tokens: int) -> bool:
        return block.block_index not in self.staged and (
            block.block_index * block_tokens >= self.num_computed or not self.started
        )

    def ready_run(self, block_tokens: int) -> list[StagedBlock]:
        """Staged blocks that follow what is computed, without a gap."""
        index, rest = divmod(self.num_computed, block_tokens)
        run: list[StagedBlock] = []
        while not rest and index + len(run) in self.staged:
            run.append(self.staged[index + len(run)])
        return run

    def barrier(self, block_tokens: int) -> int:
        """The position up to which to compute: from there on, blocks are in the inbox."""
        return min(self.staged) * block_tokens if self.staged else self.num_input

    def finish_after(self, token_id: int, info: EngineInfo) -> str:
        """Whether generation ends with this token, not yet appended: "stop", "length" or ""."""
        sampling = self.submit.sampling
        ends = token_id in info.eos_token_ids and not sampling.ignore_eos
        if ends or token_id in sampling.stop_token_ids:
            return "stop"
        count = len(self.answer) + 1
        full = len(self.submit.token_ids) + count >= info.max_context_tokens
        return "length" if count == sampling.max_tokens or full else ""


class StepBudget:
    """How many prompt tokens fit into a step of `max_step_s`, from measured steps."""

    # Below this a step's fixed cost dominates; above it, at first, nothing is known.
    MIN_TOKENS = 8
    FIRST_TOKENS = 32
    # Cost grows with context length, so aim below the limit.
    HEADROOM = 0.8

    def __init__(self, *, max_step_s: float, max_batch_tokens: int) -> None:
        self.max_step_s = max_step_s
        self._max_batch_tokens = max_batch_tokens
        self._prompt_token_s = 0.0
        self._decode_step_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 until a prompt was measured."""
        return 1 / self._prompt_token_s if self._prompt_token_s else 0.0

    def prompt_tokens(self, num_decoding: int) -> int:
        room = self._max_batch_tokens - num_decoding
        if not self._prompt_token_s:
            return min(room, self.FIRST_TOKENS)
        spare_s = self.max_step_s * self.HEADROOM - (self._decode_step_s if num_decoding else 0.0)
        return min(room, max(self.MIN_TOKENS, int(spare_s / self._prompt_token_s)))

    def observe(self, *, num_prompt: int, num_decoding: int, step_s: float) -> None:
        if not num_prompt:
            self._decode_step_s = _blend(self._decode_step_s, step_s)
            return
        decode_s = self._decode_step_s if num_decoding else 0.0
        # A tenth at least: a decode estimate that is too high must not make prompts look free.
        cost_s = max(step_s - decode_s, step_s / 10) / num_prompt
        self._prompt_token_s = _blend(self._prompt_token_s, cost_s)


def _blend(old: float, new: float) -> float:
    return (old + new) / 2 if old else new


class Planned(NamedTuple):
    """A sequence of the next step, and its tokens in it."""

    sequence: Sequence
    work: Work


class Scheduler:
    """Requests waiting for a slot, and those in one."""

    def __init__(self, info: EngineInfo, pool: BlockPool) -> None:
        self._info = info
        self._pool = pool
        self._free_slots = list(reversed(range(info.num_slots)))
        self._waiting: tuple[deque[Sequence], deque[Sequence]] = (deque(), deque())
        self._running: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._running and not self.num_waiting

    def add(self, submit: Submit) -> None:
        self._waiting[submit.batch_class].append(Sequence.of(submit))

    def running(self) -> list[Sequence]:
        return list(self._running.values())

    def admit(self) -> list[Sequence]:
        """Give slots to waiting requests, for as long as there are slots and KV room."""
        admitted = []
        while self._free_slots and (queue := self._next_queue()) is not None:
            sequence = queue[0]
            num_blocks = self._blocks_needed(sequence)
            if not self._pool.reserve(num_blocks):
                break  # the next in line waits for room; nobody slips past it
            queue.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.num_reserved = num_blocks
            self._running[sequence.request_id] = sequence
            admitted.append(sequence)
        return admitted

    def plan(self, budget: StepBudget, start: Callable[[Sequence], None]) -> list[Planned]:
        """The next step: a token of each decoding sequence, then prompts within the budget.

        `start` is called for a prompt whose turn has come, to bring in what is
        cached of it: it sets `num_computed`.
        """
        active = [each for each in self._running.values() if not each.held and not each.finished]
        decoding = [sequence for sequence in active if not sequence.prefilling]
        planned = [Planned(sequence, _decode_work(sequence)) for sequence in decoding]
        left = budget.prompt_tokens(len(decoding))
        for sequence in [sequence for sequence in active if sequence.prefilling]:
            if left <= 0:
                break
            if not sequence.started:
                start(sequence)
            work = self._prefill_work(sequence, left)
            if len(work.tokens):
                planned.append(Planned(sequence, work))
                left -= len(work.tokens)
        return planned

    def remove(self, request_id: int) -> Sequence | None:
        """Forget a request wherever it is; its slot and reservation are free. None: unknown."""
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._free_slots.append(sequence.slot)
            self._pool.release(sequence.num_reserved)
            return sequence
        for queue in self._waiting:
            for sequence in queue:
                if sequence.request_id == request_id:
                    queue.remove(sequence)
                    return sequence
        return None

    def find(self, request_id: int) -> Sequence | None:
        waiting = itertools.chain(*self._waiting)
        found = (each for each in waiting if each.request_id == request_id)
        return self._running.get(request_id) or next(found, None)

    def check_integrity(self) -> None:
        slots = [sequence.slot for sequence in self._running.values()]
        assert sorted(slots + self._free_slots) == list(range(self._info.num_slots))
        reserved = sum(sequence.num_reserved for sequence in self._running.values())
        assert reserved == self._pool.num_reserved
        self._pool.check_integrity()

    def _next_queue(self) -> deque[Sequence] | None:
        interactive, batch = self._waiting
        if not batch:
            return interactive or None
        if not interactive:
            return batch
        aged = batch[0].submit.submitted_s + BATCH_AGEING_S < interactive[0].submit.submitted_s
        return batch if aged else interactive

    def _prefill_work(self, sequence: Sequence, most: int) -> Work:
        position = sequence.num_computed
        end = min(position + most, sequence.barrier(self._info.block_tokens))
        # A first token that another worker has sampled is not sampled again.
        wanted = end == sequence.num_input and not sequence.has_first_token
        return Work(sequence.slot, position, sequence.input_ids[position:end], wanted)

    def _blocks_needed(self, sequence: Sequence) -> int:
        if not self._info.kv_in_pool:
            return 0
        max_tokens = sequence.submit.sampling.max_tokens or 1
        num_prompt = len(sequence.submit.token_ids)
        total = min(num_prompt + max_tokens, self._info.max_context_tokens)
        return -(-total // self._info.block_tokens)


def _decode_work(sequence: Sequence) -> Work:
    last = np.array([sequence.answer[-1]], dtype=np.uint32)
    return Work(sequence.slot, sequence.num_computed, last, wants_logits=True)

"""Which tokens go into the next engine step.

Pure: no clock, no engine, no I/O. Decoding sequences come first, one token each;
what the step's token budget leaves goes to prompts, first come first served,
interactive before batch. Prompts are cut into chunks, so a long one neither
holds up the tokens of others nor the cancelling of anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from worker.engines.contract import EngineInfo, Work
from worker.messages import Submit
from worker.pool import BlockPool

# A waiting batch request goes before interactive ones that came this much later.
BATCH_AGEING_S = 5.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the core, and how far it has come."""

    submit: Submit
    slot: int = -1
    num_reserved: int = 0
    # Tokens whose KV is in the slot, prompt and answer together.
    num_computed: int = 0
    num_cached: int = 0
    # Prompt tokens that went through the engine, counted as they go.
    num_evaluated: int = 0
    answer: list[int] = field(default_factory=list)
    finished: bool = False
    started_s: float = 0.0
    loaded_s: float = 0.0

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.submit.token_ids)

    @property
    def started(self) -> bool:
        return self.started_s > 0.0

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.num_prompt

    def finish_after(self, token_id: int, info: EngineInfo) -> str:
        """Whether generation ends with this token, not yet appended: "stop", "length" or ""."""
        sampling = self.submit.sampling
        ends = token_id in info.eos_token_ids and not sampling.ignore_eos
        if ends or token_id in sampling.stop_token_ids:
            return "stop"
        count = len(self.answer) + 1
        full = self.num_prompt + count >= info.max_context_tokens
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
        self._waiting[submit.batch_class].append(Sequence(submit))

    def admit(self) -> None:
        """Give slots to waiting requests, for as long as there are slots and KV room."""
        while self._free_slots and (queue := self._next_queue()) is not None:
            sequence = queue[0]
            num_blocks = self._blocks_needed(sequence)
            if not self._pool.reserve(num_blocks):
                return  # the next in line waits for room; nobody slips past it
            queue.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.num_reserved = num_blocks
            self._running[sequence.request_id] = sequence

    def plan(self, budget: StepBudget, start: Callable[[Sequence], None]) -> list[Planned]:
        """The next step: a token of each decoding sequence, then prompts within the budget.

        `start` is called for a prompt whose turn has come, to bring in what is
        cached of it: it sets `num_computed`.
        """
        decoding = [sequence for sequence in self._running.values() if not sequence.prefilling]
        planned = [Planned(sequence, _decode_work(sequence)) for sequence in decoding]
        left = budget.prompt_tokens(len(decoding))
        for sequence in [item for item in self._running.values() if item.prefilling]:
            if left <= 0:
                break
            if not sequence.started:
                start(sequence)
            work = _prefill_work(sequence, left)
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

    def _blocks_needed(self, sequence: Sequence) -> int:
        if not self._info.kv_in_pool:
            return 0
        max_tokens = sequence.submit.sampling.max_tokens or 1
        total = min(sequence.num_prompt + max_tokens, self._info.max_context_tokens)
        return -(-total // self._info.block_tokens)


def _decode_work(sequence: Sequence) -> Work:
    last = np.array([sequence.answer[-1]], dtype=np.uint32)
    return Work(sequence.slot, sequence.num_computed, last, wants_logits=True)


def _prefill_work(sequence: Sequence, most: int) -> Work:
    position = sequence.num_computed
    tokens = sequence.submit.token_ids[position : position + most]
    complete = position + len(tokens) == sequence.num_prompt
    return Work(sequence.slot, position, tokens, wants_logits=complete)

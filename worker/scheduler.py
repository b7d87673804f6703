"""Which requests get a slot, and which tokens go into the next engine step.

Pure: no clock, no engine, no I/O. Decoding sequences come first, one token each;
what the step's token budget leaves goes to prompts, in the order of worker.order.
Prompts are cut into chunks, so a long one neither holds up the tokens of others nor
the cancelling of anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import numpy as np

from services.core.tokens import TokenArray
from worker.engines.contract import EngineInfo, Work
from worker.messages import Submit
from worker.order import Urgency, in_order
from worker.prefix_cache import PrefixCache
from worker.sequence import Sequence


class StepBudget:
    """How many prompt tokens fit into a step of `max_step_s`, from measured steps."""

    # Below this a step's fixed cost dominates; above it, at first, nothing is known.
    MIN_TOKENS = 8
    FIRST_TOKENS = 32
    # Cost grows with context length, so aim below the limit.
    HEADROOM = 0.8
    # Of what decoding takes, prompts get so much more in any case: where it takes all of
    # `max_step_s`, they would wait until answers end, and answers never pause for them.
    LEAST_SHARE = 0.25
    # Of a prompt's measured cost, half counts after so many more tokens. Tokens count, not
    # steps: a small first step is mostly its fixed cost, and cold.
    HALF_LIFE_TOKENS = 128

    def __init__(self, *, max_step_s: float, max_batch_tokens: int) -> None:
        self.max_step_s = max_step_s
        self._max_batch_tokens = max_batch_tokens
        self._prompt_tokens = 0.0
        self._prompt_s = 0.0
        self._decode_step_s = 0.0

    @property
    def _prompt_token_s(self) -> float:
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 until a prompt was measured."""
        return 1 / self._prompt_token_s if self._prompt_token_s else 0.0

    def prompt_tokens(self, num_decoding: int) -> int:
        room = self._max_batch_tokens - num_decoding
        if not self._prompt_token_s:
            return min(room, self.FIRST_TOKENS)
        decode_s = self._decode_step_s if num_decoding else 0.0
        spare_s = max(self.max_step_s * self.HEADROOM - decode_s, self.LEAST_SHARE * decode_s)
        return min(room, max(self.MIN_TOKENS, int(spare_s / self._prompt_token_s)))

    def observe(self, *, num_prompt: int, num_decoding: int, step_s: float) -> None:
        if not num_prompt:
            self._decode_step_s = _blend(self._decode_step_s, step_s)
            return
        decode_s = self._decode_step_s if num_decoding else 0.0
        # A tenth at least: a decode estimate that is too high must not make prompts look free.
        cost_s = max(step_s - decode_s, step_s / 10)
        kept = 0.5 ** (num_prompt / self.HALF_LIFE_TOKENS)
        self._prompt_tokens = kept * self._prompt_tokens + num_prompt
        self._prompt_s = kept * self._prompt_s + cost_s


def _blend(old: float, new: float) -> float:
    return (old + new) / 2 if old else new


class Planned(NamedTuple):
    """A sequence of the next step, and its tokens in it."""

    sequence: Sequence
    work: Work


class Scheduler:
    """Requests waiting for a slot, and those in one."""

    def __init__(self, info: EngineInfo, cache: PrefixCache, budget: StepBudget) -> None:
        self._info = info
        self._cache = cache
        self._budget = budget
        self._free_slots = list(reversed(range(info.num_slots)))
        # Both by request id.
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of all requests that are still to be computed here.

        Without those that the cache has, or that are being computed for another request.
        """
        return sum(map(self._cache.num_to_compute, self.everyone()))

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def add(self, submit: Submit) -> None:
        self._waiting[submit.request_id] = Sequence.of(submit)

    def everyone(self) -> Iterable[Sequence]:
        """Those that run, then those that wait."""
        return itertools.chain(self._running.values(), self._waiting.values())

    def running(self) -> list[Sequence]:
        return list(self._running.values())

    def admit(self) -> list[Sequence]:
        """Give slots to waiting requests, for as long as there are slots and KV room.

        Those go past that wait for what another one computes.
        """
        admitted: list[Sequence] = []
        if not self._free_slots or not self._waiting:
            return admitted
        for sequence in self._in_order(self._waiting.values()):
            if self._cache.awaited(sequence) is not None:
                continue
            if not self._free_slots or not self._cache.admit(sequence):
                break  # the next in line waits for room; nobody slips past it
            del self._waiting[sequence.request_id]
            sequence.slot = self._free_slots.pop()
            self._running[sequence.request_id] = sequence
            admitted.append(sequence)
        return admitted

    def plan(
        self, start: Callable[[Sequence], None], *, decodes: bool = True, prompts: bool = True
    ) -> list[Planned]:
        """The next step: a token of each decoding sequence, then prompts within the budget.

        `start` is called for a prompt whose turn has come, to bring in what is
        cached of it: it sets `started_s` and `num_computed`.
        """
        decoding, prefilling = self._ready()
        planned = _plan_decodes(decoding) if decodes else []
        if not (prefilling and prompts):
            return planned
        left = self._budget.prompt_tokens(len(planned))
        for sequence in self._in_order(prefilling):
            if left <= 0:
                break
            if self._cache.awaited(sequence) is not None:
                continue
            if not sequence.begun:
                start(sequence)
            work = self._prefill_work(sequence, left)
            if len(work.tokens):
                self._cache.begin(sequence)
                planned.append(Planned(sequence, work))
                left -= len(work.tokens)
        return planned

    def answering(self) -> list[Sequence]:
        """Those that go on with their answers, where no prompt is to be computed beside them."""
        decoding, prefilling = self._ready()
        return [] if prefilling else decoding

    def remove(self, request_id: int) -> Sequence | None:
        """Forget a request wherever it is; its slot and KV are free. None: unknown."""
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._free_slots.append(sequence.slot)
            self._cache.release(sequence)
            return sequence
        return self._waiting.pop(request_id, None)

    def find(self, request_id: int) -> Sequence | None:
        return self._running.get(request_id) or self._waiting.get(request_id)

    def check_integrity(self) -> None:
        slots = [sequence.slot for sequence in self._running.values()]
        assert sorted(slots + self._free_slots) == list(range(self._info.num_slots))
        assert not self._running.keys() & self._waiting.keys()
        self._cache.check_integrity(self._running.values())

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Whose turn may be next: those that go on with their answers, and prompts."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for each in self._running.values():
            if not (each.held or each.finished or each.cancelled):
                (prefilling if each.num_computed < each.num_input else decoding).append(each)
        return decoding, prefilling

    def _in_order(self, sequences: Collection[Sequence]) -> list[Sequence]:
        """The most urgent first. Whoever others wait for is as urgent as they are."""
        if len(sequences) < 2:
            return list(sequences)
        urgencies = {sequence: self._urgency(sequence) for sequence in sequences}
        for sequence in self.everyone():
            other = self._cache.awaited(sequence)
            if other in urgencies:
                urgencies[other] = urgencies[other].lent(self._urgency(sequence))
        return in_order(urgencies)

    def _urgency(self, sequence: Sequence) -> Urgency:
        num_tokens = self._cache.num_to_compute(sequence)
        return Urgency.of(sequence.submit, num_tokens, self._budget.prefill_tokens_per_s)

    def _prefill_work(self, sequence: Sequence, most: int) -> Work:
        position = sequence.num_computed
        end = min(position + most, sequence.barrier(self._info.block_tokens))
        # A first token that another worker has sampled is not sampled again.
        wanted = end == sequence.num_input and not sequence.has_first_token
        return Work(sequence.slot, position, sequence.input_ids[position:end], int(wanted))


def _plan_decodes(sequences: list[Sequence]) -> list[Planned]:
    """The last token of each, and its draft behind it."""
    last = np.array([each.answer[-1] for each in sequences], np.uint32).reshape(-1, 1)
    return [
        Planned(each, _decode_work(each, token))
        for each, token in zip(sequences, last, strict=True)
    ]


def _decode_work(sequence: Sequence, token: TokenArray) -> Work:
    if not sequence.draft:
        return Work(sequence.slot, sequence.num_computed, token, 1)
    tokens = np.concatenate((token, np.array(sequence.draft, np.uint32)))
    return Work(sequence.slot, sequence.num_computed, tokens, len(tokens))

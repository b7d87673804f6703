"""Scheduler and cache at work without an engine, on a clock that counts computed tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from services.core.keys import extend_keys, root_key
from services.core.sampling import Sampling
from services.core.tokens import TokenArray, pack
from worker.engines.contract import EngineInfo
from worker.messages import Submit
from worker.pool import BlockPool
from worker.prefix_cache import PrefixCache, TokenNames
from worker.scheduler import Scheduler, StepBudget
from worker.sequence import Sequence

BLOCK_TOKENS = 8
INFO = EngineInfo(
    name="test",
    model="model",
    fingerprint=b"fingerprint",
    vocabulary_size=100,
    eos_token_ids=(2,),
    num_slots=4,
    max_context_tokens=4096,
    block_tokens=BLOCK_TOKENS,
    block_bytes=1,
    num_blocks=64,
    kv_in_pool=True,
)
ROOT = root_key(model="test", block_tokens=BLOCK_TOKENS)


def prompt(name: int, length: int) -> TokenArray:
    """Of one name all begin alike."""
    return np.full(length, name, np.uint32)


class Steps:
    """An engine that computes `tokens_per_s`, `step_tokens` a step, and always answers 1."""

    def __init__(
        self, info: EngineInfo = INFO, *, tokens_per_s: float = 1000.0, step_tokens: int = 16
    ) -> None:
        self.info = info
        self.pool = BlockPool(np.zeros((info.num_blocks, info.block_bytes), np.uint8))
        self.cache = PrefixCache(info, self.pool, TokenNames(info))
        self.budget = StepBudget(max_step_s=1e6, max_batch_tokens=step_tokens)
        self.budget.observe(num_prompt=1, num_decoding=0, step_s=1 / tokens_per_s)
        self.scheduler = Scheduler(info, self.cache, self.budget)
        self.now_s = 0.0
        # When each request had its first token, and when it ended.
        self.first_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}
        # Prompt tokens computed, by request; and how often each whole block was.
        self.evaluated: Counter[int] = Counter()
        self.times_computed: Counter[bytes] = Counter()
        self._tokens_per_s = tokens_per_s

    def add(self, request_id: int, token_ids: TokenArray, *, most: int = 1, **more: Any) -> None:
        more.setdefault("submitted_s", self.now_s)
        more.setdefault("batch_class", False)
        keys = (ROOT, *extend_keys(ROOT, pack(token_ids), BLOCK_TOKENS))
        self.scheduler.add(
            Submit(request_id, token_ids, keys, sampling=Sampling(max_tokens=most), **more)
        )

    def step(self) -> list[int]:
        """The requests that were in it."""
        for sequence in self.scheduler.admit():
            if sequence.held:
                self._start(sequence)
        planned = self.scheduler.plan(self._start)
        num_prompt = sum(len(work.tokens) for each, work in planned if each.prefilling)
        self.now_s += max(num_prompt, bool(planned)) / self._tokens_per_s
        for sequence, work in planned:
            if sequence.prefilling:
                self.evaluated[sequence.request_id] += len(work.tokens)
                sequence.num_evaluated += len(work.tokens)
                self._count_blocks(sequence, len(work.tokens))
            sequence.num_computed += len(work.tokens)
            if work.wants_logits:
                self._answer(sequence)
        for sequence in self.scheduler.running():
            if self.cache.due(sequence):
                self.cache.keep(sequence)
        for sequence in self.scheduler.running():
            if sequence.finished:
                self.end(sequence.request_id)
        self.scheduler.check_integrity()
        return [each.request_id for each, _ in planned]

    def run(self) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("it does not end")

    def end(self, request_id: int) -> None:
        """Finished or cancelled."""
        self.ended_s[request_id] = self.now_s
        self.scheduler.remove(request_id)
        self.scheduler.check_integrity()

    def _start(self, sequence: Sequence) -> None:
        sequence.started_s = sequence.started_s or max(self.now_s, 1e-9)
        self.cache.bring_in(sequence)

    def _answer(self, sequence: Sequence) -> None:
        self.first_s.setdefault(sequence.request_id, self.now_s)
        sequence.finished = bool(sequence.finish_after(1, self.info)) or sequence.for_another
        sequence.answer.append(1)

    def _count_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        first = sequence.num_computed // BLOCK_TOKENS
        last = (sequence.num_computed + num_tokens) // BLOCK_TOKENS
        for block in sequence.chain[first:last]:
            self.times_computed[block.prefix_key] += 1

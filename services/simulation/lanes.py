"""Steps of a virtual engine that are in progress, and how many of them are leapt over at once."""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple

from worker.engines.contract import EngineInfo
from worker.scheduler import Planned
from worker.sequence import Sequence
from worker.steps import Kinds

# Of a step: times that differ by less are equal.
TINY = 1e-9


class Run(NamedTuple):
    """Steps of equal length, one after the other, of the same sequences."""

    planned: list[Planned]
    began_s: float
    step_s: float
    num_steps: int

    @property
    def end_s(self) -> float:
        return self.began_s + self.num_steps * self.step_s

    @property
    def num_prompt(self) -> int:
        return sum(len(work.tokens) for sequence, work in self.planned if sequence.prefilling)

    @property
    def num_decoding(self) -> int:
        return sum(not item.sequence.prefilling for item in self.planned)

    def num_ended(self, now_s: float) -> int:
        """Steps that have ended by now."""
        if not self.step_s:
            return self.num_steps
        num_steps = math.floor((now_s - self.began_s) / self.step_s + TINY)
        return min(max(0, num_steps), self.num_steps)

    def cut(self, now_s: float) -> Run:
        """With the step in progress as its last."""
        if not self.step_s:
            return self
        num_steps = math.ceil((now_s - self.began_s) / self.step_s - TINY)
        return self._replace(num_steps=min(max(1, num_steps), self.num_steps))


class Lane:
    """What steps of these kinds are in progress. Of one engine, each kind is in one lane."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.run: Run | None = None
        self.timer: asyncio.TimerHandle | None = None

    def holds(self, sequence: Sequence) -> bool:
        return self.run is not None and any(item.sequence is sequence for item in self.run.planned)

    def clear(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.run = self.timer = None


def left(sequence: Sequence, info: EngineInfo) -> int:
    """Tokens of the answer that are still to come."""
    total = len(sequence.submit.token_ids) + len(sequence.answer)
    most = (sequence.submit.sampling.max_tokens or 1) - len(sequence.answer)
    return min(most, info.max_context_tokens - total)

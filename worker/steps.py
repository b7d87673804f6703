"""The engine's steps in progress: one after the other, or decodes beside prompts."""

from __future__ import annotations

import time
from typing import NamedTuple

from worker.bubbles import Gap
from worker.engines.contract import Engine, Logits
from worker.scheduler import Planned
from worker.sequence import Sequence


class Kinds(NamedTuple):
    """What a step may have in it."""

    decodes: bool
    prompts: bool


TOGETHER = (Kinds(decodes=True, prompts=True),)
BESIDE = (Kinds(decodes=True, prompts=False), Kinds(decodes=False, prompts=True))


class Ended(NamedTuple):
    """A step that has ended. `logits`: a row for each work that wants them."""

    planned: list[Planned]
    logits: Logits
    began_s: float
    ended_s: float
    # Of that time, what no step counts that ended before.
    busy_s: float
    # Tokens of prompts, and sequences that go on with their answers.
    num_prompt: int
    num_decoding: int
    # Tokens of their drafts.
    num_drafted: int


class _Begun(NamedTuple):
    planned: list[Planned]
    began_s: float
    # 0: it takes as long as `evaluate` does.
    end_s: float


class Steps:
    """A sequence in a step in progress is not to be changed before that has ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stepper = engine.stepper
        overlap = self._stepper is not None and self._stepper.overlap
        self._kinds = BESIDE if overlap else TOGETHER
        self._begun: dict[Kinds, _Begun] = {}
        self._busy_from_s = 0.0
        self._idle_from_s: float | None = None

    def free(self) -> list[Kinds]:
        """The steps that can begin now."""
        return [each for each in self._kinds if each not in self._begun]

    def holds(self, sequence: Sequence) -> bool:
        return any(
            item.sequence is sequence for begun in self._begun.values() for item in begun.planned
        )

    def wait_s(self) -> float | None:
        """Until the next one ends; None: there is none."""
        if not self._begun:
            return None
        end_s = min(begun.end_s for begun in self._begun.values())
        return max(0.0, end_s - time.monotonic())

    def begin(self, kinds: Kinds, planned: list[Planned]) -> Gap | None:
        """Nothing, if nothing is planned. The gap that this step ends, if it ends one."""
        if not planned:
            return None
        began_s, end_s = time.monotonic(), 0.0
        gap = None
        if not self._begun:
            self._busy_from_s = began_s
            gap = None if self._idle_from_s is None else Gap(self._idle_from_s, began_s)
        if self._stepper is not None:
            end_s = self._stepper.begin([item.work for item in planned])
        self._begun[kinds] = _Begun(planned, began_s, end_s)
        return gap

    def ended(self) -> list[Ended]:
        """Those whose time has come. Waits for no other."""
        now_s = time.monotonic()
        due = [kinds for kinds, begun in self._begun.items() if begun.end_s <= now_s]
        due.sort(key=lambda kinds: self._begun[kinds].end_s)
        return [self._end(self._begun.pop(kinds)) for kinds in due]

    def _end(self, begun: _Begun) -> Ended:
        logits = self._engine.evaluate([item.work for item in begun.planned])
        # However late we look: from then on the engine had nothing to do.
        ended_s = begun.end_s or time.monotonic()
        busy_s = ended_s - self._busy_from_s
        self._busy_from_s = self._idle_from_s = ended_s
        prompts = [len(work.tokens) for sequence, work in begun.planned if sequence.prefilling]
        return Ended(
            *(begun.planned, logits, begun.began_s, ended_s, busy_s),
            num_prompt=sum(prompts),
            num_decoding=len(begun.planned) - len(prompts),
            num_drafted=sum(len(each.draft) for each, _ in begun.planned),
        )

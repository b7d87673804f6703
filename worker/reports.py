"""What the core has to say: what a turn brought, and what it has done since its start. Pure."""

from __future__ import annotations

from collections import deque

from worker.messages import (
    Bubble,
    CoreLoad,
    DraftCounts,
    ExportedBlock,
    FirstTokenTimes,
    PlainToken,
    Progress,
    RequestFailed,
    Started,
    StepReport,
    TransferDone,
    Verified,
)
from worker.pool import BlockPool, PoolEvents
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.steps import Ended


class PendingReport:
    """What there is to report."""

    def __init__(self) -> None:
        self._clear()
        self._reported: CoreLoad | None = None

    def _clear(self) -> None:
        self.tokens: list[PlainToken] = []
        self.released: list[int] = []
        self.started: list[Started] = []
        self.progress: list[Progress] = []
        self.exported: list[ExportedBlock] = []
        self.inbox_freed: list[int] = []
        self.transfers: list[TransferDone] = []
        self.bubbles: list[Bubble] = []
        self.verified: list[Verified] = []
        self.failed: list[RequestFailed] = []

    def take(self, events: PoolEvents, load: CoreLoad) -> StepReport | None:
        """None when there is nothing to say. A step of prompts alone changes the load."""
        parts = (
            *(self.tokens, self.released, self.started, self.progress),
            *(self.exported, self.inbox_freed, self.transfers, self.bubbles),
            *(self.verified, self.failed),
            *(events.stored, events.evicted),
        )
        if load == self._reported and not any(parts):
            return None
        self._reported = load
        report = StepReport(
            tokens=self.tokens,
            released=self.released,
            stored=events.stored,
            evicted=events.evicted,
            load=load,
            started=self.started,
            progress=self.progress,
            exported=self.exported,
            inbox_freed=self.inbox_freed,
            transfers=self.transfers,
            bubbles=self.bubbles,
            verified=self.verified,
            failed=tuple(self.failed),
        )
        self._clear()
        return report


class Counters:
    """Counted since the core's start."""

    def __init__(self) -> None:
        self.prompt_tokens_evaluated = 0
        self.decode_tokens_evaluated = 0
        self.prompt_tokens_cached = 0
        self.num_steps = 0
        self.engine_busy_s = 0.0
        self.recent_steps_s: deque[float] = deque(maxlen=100)
        self.bubble_s: dict[str, float] = {}

    def add_step(self, step: Ended) -> None:
        """Before its tokens count as computed."""
        self.prompt_tokens_evaluated += step.num_prompt
        self.decode_tokens_evaluated += step.num_decoding
        self.num_steps += 1
        self.engine_busy_s += step.busy_s
        self.recent_steps_s.append(step.ended_s - step.began_s)

    def add_bubble(self, bubble: Bubble) -> None:
        before_s = self.bubble_s.get(bubble.stage, 0.0)
        # Another dict: what was reported stays as it was.
        self.bubble_s = {**self.bubble_s, bubble.stage: before_s + bubble.duration_s}

    def load(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        *,
        num_outbox_blocks: int,
        prefill_tokens_per_s: float,
        drafts: dict[str, DraftCounts],
    ) -> CoreLoad:
        return CoreLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks_cached=pool.num_cached,
            num_blocks_reserved=pool.num_reserved + pool.num_pinned,
            num_blocks_total=pool.num_blocks,
            num_outbox_blocks=num_outbox_blocks,
            prompt_tokens_evaluated=self.prompt_tokens_evaluated,
            decode_tokens_evaluated=self.decode_tokens_evaluated,
            prompt_tokens_cached=self.prompt_tokens_cached,
            num_steps=self.num_steps,
            engine_busy_s=self.engine_busy_s,
            longest_step_ms=max(self.recent_steps_s, default=0.0) * 1e3,
            prefill_tokens_per_s=prefill_tokens_per_s,
            queued_prompt_tokens=scheduler.num_queued_tokens,
            bubble_s=self.bubble_s,
            drafts=drafts,
        )


def first_token_times(sequence: Sequence, evaluated_s: float, now_s: float) -> FirstTokenTimes:
    """It has just been sampled."""
    sequence.phases.end(now_s)
    return FirstTokenTimes(
        submitted_s=sequence.submit.submitted_s,
        started_s=sequence.started_s,
        evaluated_s=evaluated_s,
        sampled_s=now_s,
        intervals=tuple(sequence.phases.intervals),
        spent_s=sequence.phases.spent_s,
        cached_tokens=sequence.num_cached,
        evaluated_prompt_tokens=sequence.num_evaluated,
        batch_size=sequence.batch_size,
    )

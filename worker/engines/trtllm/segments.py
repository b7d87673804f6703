"""From the engine's own times to the segments of TTFT. Pure.

Its times are readings of CLOCK_MONOTONIC, which this machine's processes share; those that
are not set are 0. They come with an output, as a rule only with the last: until then a first
token's time is split where this process handed the request to the engine.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from services.core.ledger import Segment
from worker.messages import FirstTokenTimes
from worker.phases import Phases


class Timing(Protocol):
    """Of RequestPerfMetrics.timing_metrics, what is used here."""

    @property
    def arrival_time(self) -> timedelta: ...
    @property
    def first_scheduled_time(self) -> timedelta: ...
    @property
    def first_token_time(self) -> timedelta: ...
    @property
    def kv_cache_transfer_start(self) -> timedelta: ...
    @property
    def kv_cache_transfer_end(self) -> timedelta: ...


def first_token_times(
    phases: Phases,
    timing: Timing | None,
    *,
    submitted_s: float,
    asked_s: float,
    now_s: float,
    num_prompt: int,
    num_cached: int,
    batch_size: int,
) -> FirstTokenTimes:
    """The first token has just come. `asked_s`: when the engine got the request."""
    scheduled_s = evaluated_s = 0.0
    if timing is not None:
        scheduled_s = timing.first_scheduled_time.total_seconds()
        evaluated_s = timing.first_token_time.total_seconds()
    # Of another clock, or not set.
    if not asked_s <= scheduled_s <= now_s:
        scheduled_s = asked_s
    if not scheduled_s <= evaluated_s <= now_s:
        evaluated_s = now_s
    phases.enter(Segment.PREFILL, scheduled_s)
    phases.enter(Segment.TRANSFER, evaluated_s)
    phases.end(now_s)
    return FirstTokenTimes(
        submitted_s=submitted_s,
        started_s=scheduled_s,
        evaluated_s=evaluated_s,
        sampled_s=now_s,
        intervals=tuple(phases.intervals),
        spent_s=phases.spent_s,
        cached_tokens=num_cached,
        evaluated_prompt_tokens=num_prompt - num_cached,
        batch_size=batch_size,
    )


def transfer_s(timing: Timing) -> float:
    """How long its KV was on the way: told on the side that fetched it alone."""
    duration = timing.kv_cache_transfer_end - timing.kv_cache_transfer_start
    return max(0.0, duration.total_seconds())

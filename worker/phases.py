"""Where a request's time in the core goes, until its first token. Pure.

A request is in one phase at a time, and each begins with an event of its own:

    kv_load        it is held for KV, or KV of its own is being brought into the engine
    prefill        a step has it, or its first token is being sampled
    transfer       between two steps, its KV is being exported for another worker
    prefill_queue  none of these: it waits for a slot, for its turn, for others' steps

Where KV comes while a step has it, the step counts: that load is hidden.
"""

from __future__ import annotations

from services.core.ledger import Interval, Segment

# A prompt of very many steps is told in so many intervals; the sums go on.
MAX_INTERVALS = 64


class Phases:
    """Times are readings of one clock, each no earlier than the one before."""

    __slots__ = ("_segment", "_since_s", "ended_s", "intervals", "spent_s")

    def __init__(self, submitted_s: float) -> None:
        self.intervals: list[Interval] = []
        self.spent_s: dict[Segment, float] = {}
        self.ended_s: float | None = None
        # None: the first token is there, since `ended_s`.
        self._segment: Segment | None = Segment.PREFILL_QUEUE
        self._since_s = submitted_s

    def enter(self, segment: Segment, now_s: float) -> None:
        """Nothing once the first token is there."""
        if self._segment is not None and segment is not self._segment:
            self._close(self._segment, now_s)
            self._segment, self._since_s = segment, now_s

    def end(self, now_s: float) -> None:
        """May be called twice."""
        if self._segment is not None:
            self._close(self._segment, now_s)
            self._segment = None
            self.ended_s = now_s

    def until(self, now_s: float) -> list[Interval]:
        """With the phase that it is in now."""
        if self._segment is None:
            return self.intervals
        return [*self.intervals, Interval(self._segment, self._since_s, now_s)]

    def _close(self, segment: Segment, now_s: float) -> None:
        self.spent_s[segment] = self.spent_s.get(segment, 0.0) + now_s - self._since_s
        if len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(Interval(segment, self._since_s, now_s))

"""Where the time to first token went.

Each process keeps one `Ledger` a request: intervals on its own monotonic clock,
each measured where it happens. What a process did not measure stays unowned, and
shows as the residual of the whole. A request that fails has a ledger up to there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple


class Segment(enum.StrEnum):
    """The segments of TTFT, in the order a request meets them."""

    QUEUE = "queue"
    PREPROCESS = "preprocess"
    ROUTE = "route"
    PREFILL_QUEUE = "prefill_queue"
    KV_LOAD = "kv_load"
    PREFILL = "prefill"
    TRANSFER = "transfer"


class Interval(NamedTuple):
    """Seconds on this process's monotonic clock."""

    segment: Segment
    start_s: float
    end_s: float


class Ledger:
    """The intervals of one request in one process.

    Durations that another process measured enter through `spend`: they count
    toward the sums, and have no place on this clock.
    """

    __slots__ = ("_spent_s", "arrived_s", "failed_s", "first_token_s", "hidden_s", "intervals")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None
        self.failed_s: float | None = None
        self.intervals: list[Interval] = []
        # Work beside the critical path, by name: no part of the sums.
        self.hidden_s: dict[str, float] = {}
        self._spent_s: dict[Segment, float] = {}

    def record(self, segment: Segment, start_s: float, end_s: float) -> None:
        self.intervals.append(Interval(segment, start_s, end_s))
        self.spend(segment, end_s - start_s)

    def spend(self, segment: Segment, duration_s: float) -> None:
        self._spent_s[segment] = self._spent_s.get(segment, 0.0) + duration_s

    def hide(self, name: str, duration_s: float) -> None:
        if duration_s > 0:
            self.hidden_s[name] = self.hidden_s.get(name, 0.0) + duration_s

    def mark_first_token(self, now_s: float) -> None:
        """Only the first call counts."""
        if self.first_token_s is None:
            self.first_token_s = now_s

    def mark_failure(self, now_s: float) -> None:
        """Only the first call counts, and a first token that came before counts instead."""
        if self.failed_s is None:
            self.failed_s = now_s

    def spent_s(self, segment: Segment) -> float:
        return self._spent_s.get(segment, 0.0)

    def sums_s(self) -> Iterable[tuple[Segment, float]]:
        """Of each segment that has any."""
        return self._spent_s.items()

    @property
    def total_s(self) -> float:
        """From arrival to the first token, or else to the failure; 0 before that."""
        end_s = self.failed_s if self.first_token_s is None else self.first_token_s
        return 0.0 if end_s is None else end_s - self.arrived_s

    @property
    def residual_s(self) -> float:
        return self.total_s - sum(self._spent_s.values())

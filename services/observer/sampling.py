"""Whose spans are kept. Pure."""

from __future__ import annotations

import math
from collections import deque

from services.observer.model import Request

# The slowest twentieth of the last requests of a class, once there are enough to tell.
SLOWEST_SHARE = 0.05
NUM_REMEMBERED = 1000
NUM_NEEDED = 100
# How often that is worked out anew, in requests.
NUM_BETWEEN = 50
MAX_CLASSES = 16


class TailRule:
    """Keeps what the head of the trace chose, and beside it what was slow or failed."""

    def __init__(self, *, slow_ttft_s: float) -> None:
        # 0: no time is slow as such.
        self.slow_ttft_s = slow_ttft_s
        self._classes: dict[str, _Times] = {}

    def keep(self, request: Request) -> bool:
        """To be asked once for each request: it is compared with those before it."""
        kept = self.would_keep(request)
        if request.ttft_s is not None:
            self._learn(request.request_class, request.ttft_s)
        return kept

    def would_keep(self, request: Request) -> bool:
        return (
            any(hop.sampled for hop in request.hops)
            or bool(request.error)
            or (request.ttft_s is not None and self._is_slow(request.request_class, request.ttft_s))
        )

    def _is_slow(self, request_class: str, ttft_s: float) -> bool:
        times = self._classes.get(request_class)
        among_slowest = times is not None and ttft_s > times.slow_s
        return among_slowest or 0 < self.slow_ttft_s <= ttft_s

    def _learn(self, request_class: str, ttft_s: float) -> None:
        if request_class in self._classes or len(self._classes) < MAX_CLASSES:
            self._classes.setdefault(request_class, _Times()).add(ttft_s)


class _Times:
    def __init__(self) -> None:
        # From here on a time is among the slowest.
        self.slow_s = math.inf
        self._recent: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._num_until_next = NUM_NEEDED

    def add(self, ttft_s: float) -> None:
        self._recent.append(ttft_s)
        self._num_until_next -= 1
        if self._num_until_next <= 0:
            self._num_until_next = NUM_BETWEEN
            ordered = sorted(self._recent)
            self.slow_s = ordered[int((1 - SLOWEST_SHARE) * len(ordered))]

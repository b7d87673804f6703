"""Whose spans are kept. Pure."""

from __future__ import annotations

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
        is_slow = self._is_slow(request.request_class, request.ttft_s)
        return is_slow or bool(request.error) or any(hop.sampled for hop in request.hops)

    def _is_slow(self, request_class: str, ttft_s: float | None) -> bool:
        if ttft_s is None:
            return False
        times = self._classes.get(request_class)
        if times is None and len(self._classes) < MAX_CLASSES:
            times = self._classes[request_class] = _Times()
        among_slowest = times is not None and times.add(ttft_s)
        return among_slowest or 0 < self.slow_ttft_s <= ttft_s


class _Times:
    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._num_until_next = NUM_NEEDED
        self._slow_s = float("inf")

    def add(self, ttft_s: float) -> bool:
        """Whether it is among the slowest."""
        is_slow = ttft_s > self._slow_s
        self._recent.append(ttft_s)
        self._num_until_next -= 1
        if self._num_until_next <= 0:
            self._num_until_next = NUM_BETWEEN
            ordered = sorted(self._recent)
            self._slow_s = ordered[int((1 - SLOWEST_SHARE) * len(ordered))]
        return is_slow

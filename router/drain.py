"""How fast workers take those who wait."""

from __future__ import annotations

import math


class DrainRate:
    """Pure: the caller says what time it is. Measured only while somebody waits.

    An idle queue drains as slowly as requests arrive, which says nothing of the speed
    at which a full one would. What is seen fades with time, waited or not: a rate of
    long ago, or one that too few have shown, is unknown. So a rate that is no longer
    true cannot keep refusing those by whom it would be measured again.
    """

    MEMORY_S = 30.0
    LEAST_TAKEN = 3.0
    SHORTEST_S, LONGEST_S = 0.1, 60.0
    UNKNOWN_S = 1.0

    def __init__(self) -> None:
        self._taken = 0.0
        self._draining_s = 0.0
        self._seen_s: float | None = None

    @property
    def per_s(self) -> float | None:
        """Requests a second, as of the last `advance`; None while unknown."""
        if self._taken < self.LEAST_TAKEN or not self._draining_s:
            return None
        return self._taken / self._draining_s

    def advance(self, now_s: float, *, draining: bool) -> None:
        """Time has come to `now_s`, and somebody waited since the last call, or nobody did."""
        if self._seen_s is not None:
            elapsed_s = max(now_s - self._seen_s, 0.0)
            self._taken *= math.exp(-elapsed_s / self.MEMORY_S)
            self._draining_s *= math.exp(-elapsed_s / self.MEMORY_S)
            if draining:
                self._draining_s -= self.MEMORY_S * math.expm1(-elapsed_s / self.MEMORY_S)
        self._seen_s = now_s

    def count(self) -> None:
        """One who had waited was taken."""
        self._taken += 1.0

    def retry_delay_s(self, num_requests: float) -> float:
        """Seconds until so many have been taken: when it makes sense to come back."""
        rate = self.per_s
        if rate is None:
            return self.UNKNOWN_S
        return min(max(num_requests / rate, self.SHORTEST_S), self.LONGEST_S)

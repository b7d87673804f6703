"""When to start a service again that ended by itself. Pure."""

from __future__ import annotations

from collections import deque


class RestartPolicy:
    """Waits longer after each crash, and gives up when too many come in one window."""

    def __init__(
        self,
        *,
        max_crashes: int = 5,
        window_s: float = 60.0,
        first_delay_s: float = 0.25,
        max_delay_s: float = 4.0,
    ) -> None:
        self._max_crashes = max_crashes
        self._window_s = window_s
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._crashes_s: deque[float] = deque()

    def crashed(self, now_s: float) -> float | None:
        """Seconds to wait before the next start; None: too many crashes, do not start again."""
        while self._crashes_s and now_s - self._crashes_s[0] >= self._window_s:
            self._crashes_s.popleft()
        self._crashes_s.append(now_s)
        if len(self._crashes_s) > self._max_crashes:
            return None
        delay_s = self._first_delay_s * 2.0 ** (len(self._crashes_s) - 1)
        return min(delay_s, self._max_delay_s)

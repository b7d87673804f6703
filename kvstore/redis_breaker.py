"""A circuit breaker: who waits for a Redis that does not answer, and how often."""

from __future__ import annotations

from enum import Enum


class Circuit(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class CircuitBreaker:
    """Closed: calls go through. One failure opens it: calls are refused at once.

    After `open_s` one trial may run (half open): its success closes the circuit, its
    failure opens it again. Pure: the time, in seconds, is an argument.
    """

    def __init__(self, *, open_s: float, state: Circuit = Circuit.CLOSED) -> None:
        self._open_s = open_s
        self._state = state
        self._retry_at_s = 0.0
        self.num_opened = 0
        self.num_refused = 0
        self.num_trials = 0

    @property
    def state(self) -> Circuit:
        return self._state

    @property
    def is_closed(self) -> bool:
        return self._state is Circuit.CLOSED

    def admit(self) -> bool:
        """Whether an ordinary call may go through."""
        if self.is_closed:
            return True
        self.num_refused += 1
        return False

    def trial_due_in_s(self, now_s: float) -> float:
        """0: `begin_trial` would give one now."""
        return max(0.0, self._retry_at_s - now_s)

    def begin_trial(self, now_s: float) -> bool:
        if self._state is not Circuit.OPEN or now_s < self._retry_at_s:
            return False
        self._state = Circuit.HALF_OPEN
        self.num_trials += 1
        return True

    def trial_succeeded(self) -> None:
        """No other success counts: a call may have begun before the circuit opened."""
        if self._state is Circuit.HALF_OPEN:
            self._state = Circuit.CLOSED

    def failed(self, now_s: float) -> None:
        """A call, or the trial. Calls that were under way when it opened change nothing."""
        if self._state is Circuit.OPEN:
            return
        self.num_opened += self.is_closed
        self._state = Circuit.OPEN
        self._retry_at_s = now_s + self._open_s

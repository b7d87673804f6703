"""Whether the engine still works, and whether it holds what nobody needs. Pure."""

from __future__ import annotations

import enum
from typing import NamedTuple

# KV in use while nothing runs, until the engine is asked for a token: it cleans up what was
# cancelled only when new work comes (#12313).
LEAK_S = 5.0


class Advice(enum.Enum):
    NOTHING = enum.auto()
    # Ask it for a token: health checks of its own say nothing of whether it answers.
    PROBE = enum.auto()
    # It has died or hangs; nothing but a new one helps.
    RESTART = enum.auto()


class KvUse(NamedTuple):
    used_blocks: int = 0
    max_blocks: int = 0


class Watchdog:
    """Told of every sign of life; asked now and then what to do."""

    def __init__(self, *, probe_interval_s: float, stall_timeout_s: float, now_s: float) -> None:
        self._probe_interval_s = probe_interval_s
        self._stall_timeout_s = stall_timeout_s
        self._heard_s = now_s
        self._asked_s: float | None = None
        self._leaking_since_s: float | None = None
        self.num_probes = 0
        self.num_leaks = 0

    def hear(self, now_s: float) -> None:
        """An output came, or a probe was answered."""
        self._heard_s = now_s
        self._asked_s = None

    @property
    def is_probing(self) -> bool:
        """It was asked for a token, and nothing was heard since."""
        return self._asked_s is not None

    def probing(self, now_s: float) -> None:
        self.num_probes += 1
        self._asked_s = now_s

    def use(self, kv: KvUse, *, num_active: int, now_s: float) -> None:
        """What the engine's statistics say is in use, against what should be."""
        if num_active or not kv.used_blocks:
            self._leaking_since_s = None
        elif self._leaking_since_s is None:
            self._leaking_since_s = now_s

    def advise(self, now_s: float) -> Advice:
        quiet_s = now_s - self._heard_s
        if self._asked_s is not None:
            stalled = now_s - self._asked_s >= self._stall_timeout_s
            return Advice.RESTART if stalled else Advice.NOTHING
        if quiet_s >= self._probe_interval_s:
            return Advice.PROBE
        if self._leaking_since_s is not None and now_s - self._leaking_since_s >= LEAK_S:
            self.num_leaks += 1
            self._leaking_since_s = None
            return Advice.PROBE
        return Advice.NOTHING

"""What holds a process's event loop up: its lag, its waits for the GIL, collecting garbage."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from services.core.metrics import Metric, Sample

# How often the loop is asked to wake us; how late it does is the lag. A loop's timers are
# exact to a millisecond.
PROBE_INTERVAL_S = 0.25
# Quantiles are of the last one or two of these.
PERIOD_S = 30.0
QUANTILES = (0.5, 0.99, 1.0)
# Buckets of durations: each a fifth longer than the one before, up to 21 s.
_BOUNDS_S: tuple[float, ...] = tuple(50e-6 * 1.2**i for i in range(72))

_LAG = Metric(
    "firsttoken.process.loop.lag",
    "s",
    "How late the event loop ran what was due, by quantile, over the last half minute or more.",
    False,
)
_GIL = Metric(
    "firsttoken.process.gil.wait",
    "s",
    "How long the event loop's thread, having let go of the GIL, waits to have it back, by"
    " quantile, over the last half minute or more.",
    False,
)
_PAUSES = Metric(
    "firsttoken.process.gc.pauses", "s", "Time in which the process collected garbage.", True
)
_COLLECTIONS = Metric(
    "firsttoken.process.gc.collections", "{collection}", "Garbage collections by generation.", True
)
_LONGEST_PAUSE = Metric(
    "firsttoken.process.gc.longest_pause",
    "s",
    "The longest garbage collection of the last half minute or more.",
    False,
)
_CPU = Metric("firsttoken.process.cpu", "s", "CPU time used.", True)
_MEMORY = Metric("firsttoken.process.memory", "By", "Resident memory.", False)
METRICS = (_LAG, _GIL, _PAUSES, _COLLECTIONS, _LONGEST_PAUSE, _CPU, _MEMORY)


class Durations:
    """Of the last PERIOD_S or two, in a fixed number of buckets. Pure.

    A quantile is exact to a fifth; that of 1 is the longest itself.
    """

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._counts = self._none()
        self._counts_before = self._none()
        self._longest_s = self._longest_before_s = 0.0

    def add(self, duration_s: float, now_s: float) -> None:
        self._rotate(now_s)
        self._counts[bisect_left(_BOUNDS_S, duration_s)] += 1
        self._longest_s = max(self._longest_s, duration_s)

    def longest_s(self, now_s: float) -> float:
        self._rotate(now_s)
        return max(self._longest_s, self._longest_before_s)

    def quantile_s(self, share: float, now_s: float) -> float:
        """0 when there is none."""
        longest_s = self.longest_s(now_s)
        counts = [a + b for a, b in zip(self._counts, self._counts_before, strict=True)]
        rank, seen = math.ceil(share * sum(counts)), 0
        if share == 1.0 or not rank:
            return longest_s
        for bound_s, count in zip(_BOUNDS_S, counts, strict=False):
            seen += count
            if seen >= rank:
                return min(bound_s, longest_s)
        return longest_s

    def _rotate(self, now_s: float) -> None:
        age_s = now_s - self._began_s
        if age_s < PERIOD_S:
            return
        is_next = age_s < 2 * PERIOD_S
        self._counts_before = self._counts if is_next else self._none()
        self._longest_before_s = self._longest_s if is_next else 0.0
        self._counts, self._longest_s, self._began_s = self._none(), 0.0, now_s

    def _none(self) -> list[int]:
        return [0] * (len(_BOUNDS_S) + 1)


class LoopWatch:
    """A context manager, entered on the loop that it watches."""

    def __init__(self) -> None:
        now_s = time.monotonic()
        self.lags = Durations(now_s)
        self.gil_waits = Durations(now_s)
        self.pauses = Durations(now_s)
        self._paused_s = 0.0
        self._collections = [0] * len(gc.get_stats())
        self._pause_began_s = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ask()
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._on_collection)
        self._timer.cancel()

    def read(self) -> Iterator[Sample]:
        now_s = time.monotonic()
        for metric, durations in ((_LAG, self.lags), (_GIL, self.gil_waits)):
            for share in QUANTILES:
                duration_s = durations.quantile_s(share, now_s)
                yield Sample(metric.name, duration_s, (("quantile", f"{share:g}"),))
        yield Sample(_PAUSES.name, self._paused_s)
        for generation, count in enumerate(self._collections):
            yield Sample(_COLLECTIONS.name, count, (("generation", str(generation)),))
        yield Sample(_LONGEST_PAUSE.name, self.pauses.longest_s(now_s))
        yield Sample(_CPU.name, time.process_time())
        yield Sample(_MEMORY.name, _resident_bytes())

    def _ask(self) -> None:
        self._due_s = time.monotonic() + PROBE_INTERVAL_S
        self._timer = self._loop.call_later(PROBE_INTERVAL_S, self._answer)

    def _answer(self) -> None:
        now_s = time.monotonic()
        self.lags.add(max(0.0, now_s - self._due_s), now_s)
        time.sleep(0)  # a thread that waits for the GIL has it now
        self.gil_waits.add(time.monotonic() - now_s, now_s)
        self._ask()

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._pause_began_s = now_s
        elif self._pause_began_s:  # else it began before this was entered
            pause_s = now_s - self._pause_began_s
            self._paused_s += pause_s
            self._collections[info["generation"]] += 1
            self.pauses.add(pause_s, now_s)


def _resident_bytes() -> int:
    """0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0

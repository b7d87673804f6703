"""What goes wrong in a virtual mesh, and when. Times are from the workload's start, in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeAlias

from services.simulation.feeds import NO_TROUBLE, Trouble


class Death(NamedTuple):
    """A worker's process dies, and may come back with an empty cache."""

    at_s: float
    worker: int
    # None: never.
    returns_after_s: float | None = None


class Flapping(NamedTuple):
    """A worker dies and comes back, again and again: half of each period it is gone."""

    at_s: float
    worker: int
    lasts_s: float
    times_per_s: float = 10.0


class SlowWorker(NamedTuple):
    """Its steps last `factor` times as long."""

    at_s: float
    worker: int
    factor: float
    lasts_s: float


class BadReports(NamedTuple):
    """Reports of these workers to these routers come late, twice, in disorder or never."""

    at_s: float
    trouble: Trouble
    lasts_s: float
    # None: of all, to all.
    workers: tuple[int, ...] | None = None
    routers: tuple[int, ...] | None = None


class Partition(NamedTuple):
    """Neither reports nor membership reach a router. It can call the workers."""

    at_s: float
    router: int
    lasts_s: float


Fault: TypeAlias = Death | Flapping | SlowWorker | BadReports | Partition


class Victim(Protocol):
    """A mesh, as far as faults befall it. Workers and routers by their numbers."""

    def die(self, worker: int) -> None: ...
    def live(self, worker: int) -> None: ...
    def slow_down(self, worker: int, factor: float) -> None: ...
    def part(self, router: int, parted: bool) -> None: ...
    def trouble(
        self, routers: tuple[int, ...] | None, workers: tuple[int, ...] | None, trouble: Trouble
    ) -> None: ...


Step: TypeAlias = tuple[float, Callable[[Victim], None]]


def steps(faults: Iterable[Fault]) -> list[Step]:
    """Single steps in the order of time."""
    every = itertools.chain.from_iterable(map(_steps, faults))
    return sorted(every, key=lambda step: step[0])


def _steps(fault: Fault) -> list[Step]:
    match fault:
        case Death(at_s, worker, returns_after_s):
            return _death(at_s, worker, returns_after_s)
        case Flapping(at_s, worker, lasts_s, times_per_s):
            half_s = 0.5 / times_per_s
            times = range(max(1, round(lasts_s * times_per_s)))
            deaths = (_death(at_s + index * 2 * half_s, worker, half_s) for index in times)
            return list(itertools.chain.from_iterable(deaths))
        case SlowWorker(at_s, worker, factor, lasts_s):
            return [
                (at_s, lambda mesh: mesh.slow_down(worker, factor)),
                (at_s + lasts_s, lambda mesh: mesh.slow_down(worker, 1.0)),
            ]
        case BadReports(at_s, trouble, lasts_s, workers, routers):
            return [
                (at_s, lambda mesh: mesh.trouble(routers, workers, trouble)),
                (at_s + lasts_s, lambda mesh: mesh.trouble(routers, workers, NO_TROUBLE)),
            ]
        case Partition(at_s, router, lasts_s):
            return [
                (at_s, lambda mesh: mesh.part(router, True)),
                (at_s + lasts_s, lambda mesh: mesh.part(router, False)),
            ]


def _death(at_s: float, worker: int, returns_after_s: float | None) -> list[Step]:
    found: list[Step] = [(at_s, lambda mesh: mesh.die(worker))]
    if returns_after_s is not None:
        found.append((at_s + returns_after_s, lambda mesh: mesh.live(worker)))
    return found

"""Requests to one of the ways, one after the other or at given times, and their CPU."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from services.bench.overhead_rows import Heard, Request, Row
from services.bench.processes import cpu_s

CLIENT = "client"

# By name: each with what it has started.
Processes: TypeAlias = Mapping[str, Sequence[int]]


class Pace(NamedTuple):
    """Closed: so many at a time, each the next one's turn. Open: Poisson, whatever is
    answered."""

    concurrency: int = 1
    rate_per_s: float | None = None


class Turn(NamedTuple):
    heard: list[Heard]
    # How late a request of an open loop was sent; it counts into its TTFT.
    late_s: list[float]
    took_s: float
    # By process, `client` too.
    cpu_s: Mapping[str, float]


async def take_turn(
    row: Row, requests: Sequence[Request], pace: Pace, processes: Processes, *, seed: int = 0
) -> Turn:
    before_s = read_cpu(processes)
    began_s = time.perf_counter()
    late_s: list[float] = []
    if pace.rate_per_s is None:
        heard = await _ask_in_turn(row, requests, pace.concurrency)
    else:
        heard, late_s = await _ask_at(row, requests, pace.rate_per_s, seed)
    took_s = time.perf_counter() - began_s
    return Turn(heard, late_s, took_s, _spent(before_s, processes))


async def stand_still(seconds: float, processes: Processes) -> Turn:
    """What everybody spends when nobody asks."""
    before_s = read_cpu(processes)
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    return Turn([], [], time.perf_counter() - began_s, _spent(before_s, processes))


def read_cpu(processes: Processes) -> dict[str, float]:
    spent_s = {name: sum(map(_cpu_s, pids)) for name, pids in processes.items()}
    return {**spent_s, CLIENT: time.process_time()}


def due_times_s(number: int, rate_per_s: float, seed: int) -> list[float]:
    chance, at_s = random.Random(seed), 0.0
    return [at_s := at_s + chance.expovariate(rate_per_s) for _ in range(number)]


def _spent(before_s: Mapping[str, float], processes: Processes) -> dict[str, float]:
    return {name: now_s - before_s[name] for name, now_s in read_cpu(processes).items()}


def _cpu_s(pid: int) -> float:
    try:
        return cpu_s(pid)
    except OSError:  # it has ended
        return 0.0


async def _ask_in_turn(row: Row, requests: Iterable[Request], concurrency: int) -> list[Heard]:
    heard: list[Heard] = []
    waiting = iter(requests)

    async def keep_asking() -> None:
        for request in waiting:
            heard.append(await row.ask(request))

    await _all(keep_asking() for _ in range(concurrency))
    return heard


async def _ask_at(
    row: Row, requests: Sequence[Request], rate_per_s: float, seed: int
) -> tuple[list[Heard], list[float]]:
    heard: list[Heard] = []
    late_s: list[float] = []
    began_s = time.perf_counter()

    async def ask(request: Request, at_s: float) -> None:
        await asyncio.sleep(began_s + at_s - time.perf_counter())
        late = max(0.0, time.perf_counter() - began_s - at_s)
        answer = await row.ask(request)
        heard.append(answer._replace(ttft_s=answer.ttft_s + late))
        late_s.append(late)

    times_s = due_times_s(len(requests), rate_per_s, seed)
    await _all(map(ask, requests, times_s))
    return heard, late_s


async def _all(work: Iterable[object]) -> None:
    """One failure ends all, and is what is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)  # type: ignore[arg-type]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None

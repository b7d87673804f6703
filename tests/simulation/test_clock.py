"""Virtual time passes when nothing is ready, and only then."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.simulation.clock import START_S, Deadlock, run


def test_an_hour_passes_at_once() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began_s = time.monotonic()
    assert run(sleep()) == START_S + 3600
    assert time.monotonic() - began_s < 60


def test_days_pass_though_the_loop_waits_a_day_at_most() -> None:
    async def sleep() -> float:
        await asyncio.sleep(10 * 86_400)
        return asyncio.get_running_loop().time()

    assert run(sleep()) == pytest.approx(START_S + 10 * 86_400)


def test_timers_fire_in_the_order_of_their_time_and_see_it() -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        seen.append((name, asyncio.get_running_loop().time() - START_S))

    async def several() -> None:
        async with asyncio.TaskGroup() as group:
            for name, after_s in (("c", 3.0), ("a", 0.5), ("b", 2.0)):
                group.create_task(note(name, after_s))

    run(several())
    assert seen == [("a", 0.5), ("b", 2.0), ("c", 3.0)]


def test_what_is_ready_runs_before_time_passes() -> None:
    async def several() -> float:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert run(several()) == START_S


def test_timeouts_are_virtual() -> None:
    async def wait() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(31)
        return loop.time()

    assert run(wait()) == START_S + 30


def test_waiting_for_what_never_comes_is_said_at_once_with_the_tasks_name() -> None:
    async def forever() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("who waits")
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="who waits"):
        run(forever())


def test_a_cancelled_timer_keeps_nobody_waiting() -> None:
    async def forever() -> None:
        asyncio.get_running_loop().call_later(5, lambda: None).cancel()
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(forever())


def test_threads_are_refused() -> None:
    async def in_thread() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="knows no threads"):
        run(in_thread())


def test_what_a_callback_raises_ends_the_run() -> None:
    async def fail() -> None:
        def stumble() -> None:
            raise ValueError("stumbled")

        asyncio.get_running_loop().call_later(1, stumble)
        await asyncio.sleep(60)

    with pytest.raises(ValueError, match="stumbled"):
        run(fail())

from __future__ import annotations

import asyncio
import contextlib

from services.runtime.tasks import end_tasks


async def test_a_task_that_drops_a_cancellation_is_cancelled_again() -> None:
    dropped = 0

    async def deaf() -> None:
        nonlocal dropped
        while dropped < 3:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            dropped += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await end_tasks([task])

    assert dropped == 3
    assert task.cancelled()


async def test_a_task_that_has_ended_keeps_its_result() -> None:
    async def answer() -> int:
        return 7

    task = asyncio.create_task(answer())
    await task
    await end_tasks([task])
    await end_tasks([])

    assert task.result() == 7

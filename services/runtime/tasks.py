"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

CANCEL_INTERVAL_S = 0.5  # long enough for what a task does on its way out


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until each has ended. What they raised stays in them.

    Cancelling once is not enough: before Python 3.12, asyncio.wait_for drops a
    cancellation that arrives just as it completes (and redis-py calls it at each
    command), so that a loop would go on for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)

"""Waiting for what another task or process does."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

DEADLINE_S = 30.0


async def eventually(holds: Callable[[], object], what: str = "it") -> None:
    """Return as soon as `holds()`, which may be a coroutine function, is true.

    Fails loudly when it never is.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        found = holds()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S} s for {what} in vain"
        await asyncio.sleep(0.005)

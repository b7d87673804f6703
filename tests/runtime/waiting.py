"""Waiting for what another task or process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 30.0


async def eventually(holds: Callable[[], object], what: str = "it") -> None:
    """Return as soon as `holds()` is true; fail loudly when it never is."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what} in vain"
        await asyncio.sleep(0.005)

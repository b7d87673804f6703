from __future__ import annotations

import asyncio
import time

from services.runtime.delays import inject


async def test_a_delay_of_nothing_does_not_even_yield() -> None:
    ran: list[str] = []
    asyncio.get_running_loop().call_soon(ran.append, "another callback")
    await inject(0)
    await inject(-1)

    assert ran == []


async def test_a_delay_lasts_at_least_as_long_as_asked() -> None:
    started_s = time.monotonic()
    await inject(20)

    assert time.monotonic() - started_s >= 0.0199

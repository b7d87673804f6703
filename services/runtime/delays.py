"""Delays injected on purpose, to show in which segment of the ledger each lands."""

from __future__ import annotations

import asyncio


async def inject(delay_ms: float) -> None:
    if delay_ms > 0:
        await asyncio.sleep(delay_ms / 1000)

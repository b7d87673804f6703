"""Reads no faster than a set rate: a slow L2 whose speed is known, for benchmarks."""

from __future__ import annotations

import asyncio


class Throttle:
    """A link of its own kind: bytes pass one after the other. 0: no limit."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def pass_bytes(self, num_bytes: int) -> None:
        """Returns when they would have come."""
        if not self.bytes_per_s or not num_bytes:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self.bytes_per_s
        await asyncio.sleep(self._free_at_s - now_s)

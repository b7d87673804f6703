"""Looks again at the bytes of blocks that were given out by place.

A reader verifies its own copy and treats a damaged block as a miss, but the block would
stay, a miss for everybody. So whatever is given is looked at behind the answer, at most
once in a while.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from types import TracebackType

from kvstore.memory_tier import MemoryTier
from kvstore.tier2 import Record
from services.core.kvblocks import checksum
from services.runtime.tasks import end_tasks

INTERVAL_S = 5.0
# Blocks that wait to be looked at; more are left for the next time.
MAX_WAITING = 1024


class Scrubber:
    """An async context manager."""

    def __init__(self, tier: MemoryTier, threads: Executor) -> None:
        self._tier = tier
        self._threads = threads
        self._waiting: dict[bytes, Record] = {}
        self._seen_s: dict[bytes, float] = {}
        self._awake = asyncio.Event()

    async def __aenter__(self) -> Scrubber:
        self._task = asyncio.create_task(self._run(), name="kv scrubber")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await end_tasks([self._task])

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def look_at(self, record: Record) -> None:
        key = record.block.storage_key
        seen_s = self._seen_s.get(key, -INTERVAL_S)
        lately = asyncio.get_running_loop().time() - seen_s < INTERVAL_S
        if not lately and len(self._waiting) < MAX_WAITING:
            self._waiting[key] = record
            self._awake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._forget(loop.time())
            while self._waiting:
                key = next(iter(self._waiting))
                self._seen_s.pop(key, None)  # in the order of time
                self._seen_s[key] = loop.time()
                await self._look(key, self._waiting.pop(key))
            self._awake.clear()
            await self._awake.wait()

    def _forget(self, now_s: float) -> None:
        while self._seen_s:
            key, seen_s = next(iter(self._seen_s.items()))
            if seen_s + INTERVAL_S > now_s:
                return
            del self._seen_s[key]

    async def _look(self, key: bytes, record: Record) -> None:
        tier = self._tier
        entry = tier.index.find(key)
        if entry is None or entry.record is not record:
            return
        # Taken here: once the block has gone, the arena may be laid out anew.
        data = tier.arena.view(entry.slot, record.block.num_bytes)
        loop = asyncio.get_running_loop()
        digest = await loop.run_in_executor(self._threads, checksum, data)
        # Only if it is still there: evicted meanwhile, other bytes were read.
        if digest != record.checksum and tier.index.find(key) is entry:
            tier.reject(key, "checksum")

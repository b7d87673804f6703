"""Both tiers together: node memory (L1) before what outlives the node (L2)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import NamedTuple

from kvstore.memory_tier import MemoryTier
from kvstore.reader import Given, Reader
from kvstore.scrubber import Scrubber
from kvstore.tier2 import Record, Tier2, Wanted
from kvstore.writer import Writer
from services.runtime.resource import Resource

FLUSH_TIMEOUT_S = 2.0
THREADS = 2
# Looks at L2 within one match, when a chain goes from tier to tier and back.
MAX_MATCH_ROUNDS = 8


class Matched(NamedTuple):
    """Blocks from the chain's start without a gap: in L1, and in either tier."""

    num_l1: int
    num_all: int


class Selection(NamedTuple):
    """Some blocks: these, those of a tenant, or all."""

    storage_keys: Sequence[bytes] = ()
    tenant: str | None = None
    everything: bool = False


class Evicted(NamedTuple):
    num_l1: int
    num_l2: int


class KvStore(Resource):
    """An async context manager; it enters both tiers."""

    def __init__(self, tier1: MemoryTier, tier2: Tier2 | None = None) -> None:
        self.tier1 = tier1
        self.tier2 = tier2
        self.num_readers = 0
        self.num_writers = 0
        # Told which prefixes are to be had from here no more. What Redis drops, it tells nobody.
        self.on_evicted: Callable[[Collection[bytes]], None] | None = None
        if tier2 is None:
            tier1.on_gone = self._tell_evicted
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv blocks")
        self._scrubber = Scrubber(tier1, self._threads)

    async def _open(self, stack: AsyncExitStack) -> None:
        stack.callback(self.tier1.close)
        # Waiting for threads would block the loop.
        stack.push_async_callback(asyncio.to_thread, self._threads.shutdown)
        if self.tier2 is not None:
            await stack.enter_async_context(self.tier2)
            stack.push_async_callback(self._flush, self.tier2)
        await stack.enter_async_context(self._scrubber)

    @property
    def is_idle(self) -> bool:
        """Nothing is read, and nothing is on its way in."""
        return not self.num_readers and not self.tier1.index.num_reserved

    async def match(self, chain: Sequence[bytes], *, patience_s: float = math.inf) -> Matched:
        """What L2 does not say within `patience_s` is not there."""
        until_s = time.monotonic() + patience_s
        num_l1 = num_all = self.tier1.index.match(chain)
        for _ in range(MAX_MATCH_ROUNDS):
            if self.tier2 is None or num_all == len(chain):
                break
            num_l2 = await self.tier2.exists_many(
                chain, num_all, patience_s=until_s - time.monotonic()
            )
            if not num_l2:
                break
            num_all += num_l2
            num_all += self.tier1.index.match(chain[num_all:])
        return Matched(num_l1, num_all)

    async def get(
        self, chain: Sequence[bytes], indices: Sequence[int], wanted: Wanted, *, mapped: bool
    ) -> AsyncGenerator[Given, None]:
        """See Reader.read."""
        reader = Reader(self.tier1, self.tier2, self._scrubber, chain, wanted, mapped=mapped)
        self.num_readers += 1
        try:
            async with aclosing(reader.read(indices)) as answers:
                async for given in answers:
                    yield given
        finally:
            self.num_readers -= 1

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """What is reserved and not committed when the context is left is free again."""
        writer = Writer(self.tier1, self._threads, self._keep_below)
        self.num_writers += 1
        try:
            yield writer
        finally:
            self.num_writers -= 1
            writer.release()

    async def evict(self, selection: Selection, *, from_l1: bool, from_l2: bool) -> Evicted:
        num_l1 = num_l2 = 0
        prefixes: set[bytes] = set()
        if from_l1:
            keys = selection.storage_keys
            if selection.everything or selection.tenant is not None:
                keys = self.tier1.index.keys(selection.tenant)
            prefixes = self.tier1.prefixes_of(keys)
            num_l1 = self.tier1.drop(keys)
        if from_l2 and self.tier2 is not None:
            num_l2 = await self.tier2.evict(**selection._asdict())
            if self.tier2.connected:
                here = self.tier1.index.prefix_keys
                self._tell_evicted([key for key in prefixes if key not in here])
        return Evicted(num_l1, num_l2)

    def check_integrity(self) -> None:
        self.tier1.check_integrity()
        assert self.num_writers or not self.tier1.index.num_reserved

    def _tell_evicted(self, prefix_keys: Collection[bytes]) -> None:
        if prefix_keys and self.on_evicted is not None:
            self.on_evicted(prefix_keys)

    def _keep_below(self, chain: Sequence[bytes], record: Record) -> None:
        if self.tier2 is not None:
            slot = self.tier1.index.slot_of(record.block.storage_key)
            data = self.tier1.arena.view(slot, record.block.num_bytes)
            self.tier2.put_nowait(chain, record, data)

    async def _flush(self, tier2: Tier2) -> None:
        """What is committed goes down before the node does, if that is possible soon."""
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await tier2.flush()
        except TimeoutError:
            pass

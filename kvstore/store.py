"""Both tiers together: node memory (L1) before what outlives the node (L2)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from kvstore.memory_tier import MemoryTier
from kvstore.scrubber import Scrubber
from kvstore.tier2 import Found, Record, Tier2, Wanted
from kvstore.writer import Writer
from services.core.kvblocks import Place

FLUSH_TIMEOUT_S = 2.0
THREADS = 2
# Looks at L2 within one match, when a chain goes from tier to tier and back.
MAX_MATCH_ROUNDS = 8


class Matched(NamedTuple):
    """Blocks from the chain's start without a gap: in L1, and in either tier."""

    num_l1: int
    num_all: int


class Given(NamedTuple):
    """A block of a chain, in one of two ways. Without `record`: a miss."""

    chain_index: int
    record: Record | None = None
    place: Place | None = None
    data: bytes | None = None
    from_l2: bool = False


class Evicted(NamedTuple):
    num_l1: int
    num_l2: int


class KvStore:
    """An async context manager; it enters both tiers."""

    def __init__(self, tier1: MemoryTier, tier2: Tier2 | None = None) -> None:
        self.tier1 = tier1
        self.tier2 = tier2
        self.num_writers = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv blocks")
        self._scrubber = Scrubber(tier1, self._threads)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.tier1.close)
            # Waiting for threads would block the loop.
            stack.push_async_callback(asyncio.to_thread, self._threads.shutdown)
            if self.tier2 is not None:
                await stack.enter_async_context(self.tier2)
                stack.push_async_callback(self._flush, self.tier2)
            await stack.enter_async_context(self._scrubber)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def match(self, chain: Sequence[bytes]) -> Matched:
        num_l1 = num_all = self.tier1.index.match(chain)
        for _ in range(MAX_MATCH_ROUNDS):
            if self.tier2 is None or num_all == len(chain):
                break
            num_l2 = await self.tier2.exists_many(chain, num_all)
            if not num_l2:
                break
            num_all += num_l2
            num_all += self.tier1.index.match(chain[num_all:])
        return Matched(num_l1, num_all)

    async def get(
        self, chain: Sequence[bytes], indices: Sequence[int], wanted: Wanted, *, mapped: bool
    ) -> AsyncGenerator[Given, None]:
        """One answer for each index, in this order, each as soon as it is in L1."""
        tier1 = self.tier1
        tier1.index.touch([chain[index] for index in sorted(set(indices))])
        absent = deque(i for i in indices if tier1.find(chain[i], i, wanted) is None)
        async with aclosing(self._read_below(chain, tuple(absent), wanted)) as below:
            for index in indices:
                record, found = tier1.find(chain[index], index, wanted), None
                if absent and absent[0] == index:
                    # Also when another call has brought it in the meantime: answers come in order.
                    absent.popleft()
                    found = await anext(below)
                    record = self._keep(chain, found, wanted)
                from_l2 = found is not None and record is not None
                yield self._give(index, record, mapped=mapped, from_l2=from_l2)

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

    async def evict(
        self,
        *,
        storage_keys: Sequence[bytes] = (),
        tenant: str | None = None,
        everything: bool = False,
        from_l2: bool = False,
    ) -> Evicted:
        keys = storage_keys
        if everything or tenant is not None:
            keys = self.tier1.index.keys(None if everything else tenant)
        num_l1 = self.tier1.drop(keys)
        num_l2 = 0
        if from_l2 and self.tier2 is not None:
            num_l2 = await self.tier2.evict(
                storage_keys=storage_keys, tenant=tenant, everything=everything
            )
        return Evicted(num_l1, num_l2)

    def check_integrity(self) -> None:
        self.tier1.check_integrity()
        assert self.num_writers or not self.tier1.index.num_reserved

    def _give(self, index: int, record: Record | None, *, mapped: bool, from_l2: bool) -> Given:
        counters = self.tier1.counters
        data = place = None
        if record is not None:
            key = record.block.storage_key
            if mapped:
                place = self.tier1.lease(key)
                self._scrubber.look_at(record)
            else:
                data = self.tier1.copy(key, record)
        if record is None or (place is None and data is None):
            counters.num_misses += 1
            return Given(index)
        if from_l2:
            counters.num_misses += 1
        else:
            counters.hit(record.tenant, record.block.num_bytes)
        return Given(index, record, place, data, from_l2)

    async def _read_below(
        self, chain: Sequence[bytes], indices: Sequence[int], wanted: Wanted
    ) -> AsyncGenerator[Found, None]:
        if self.tier2 is None or not indices:
            for index in indices:
                yield Found(index, "missing")
            return
        async with aclosing(self.tier2.get_many(chain, indices, wanted)) as found:
            async for each in found:
                yield each

    def _keep(self, chain: Sequence[bytes], found: Found, wanted: Wanted) -> Record | None:
        """Bring a block of L2 into L1."""
        tier1 = self.tier1
        index, key = found.chain_index, chain[found.chain_index]
        record = tier1.find(key, index, wanted)
        if record is not None or found.record is None or found.payload is None:
            return record
        if key in tier1.index:
            return None  # a writer is bringing it
        parent = chain[index - 1] if index else b""
        place = tier1.reserve(found.record.block, parent, found.record.tenant, frozenset(chain))
        if place is None:
            return None
        tier1.arena.write(place.slot, found.payload)
        tier1.publish([found.record])
        tier1.tell()
        return found.record

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

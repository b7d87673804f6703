"""Reading blocks of one chain: from node memory, or through it from the tier below."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvstore.memory_tier import MemoryTier
from kvstore.scrubber import Scrubber
from kvstore.tier2 import Found, Record, Tier2, Wanted
from services.core.kvblocks import Place
from services.runtime.channels import MAX_MESSAGE_BYTES

# A message holds a block and what is said about it.
MAX_SENT_BYTES = MAX_MESSAGE_BYTES - (1 << 16)


class Given(NamedTuple):
    """A block of a chain, in one of two ways. Without `record`: a miss."""

    chain_index: int
    record: Record | None = None
    place: Place | None = None
    data: bytes | None = None
    from_l2: bool = False


class Reader:
    """One read. `mapped`: give places in L1 where there are any, otherwise bytes."""

    def __init__(
        self,
        tier1: MemoryTier,
        tier2: Tier2 | None,
        scrubber: Scrubber,
        chain: Sequence[bytes],
        wanted: Wanted,
        *,
        mapped: bool,
    ) -> None:
        self._tier1 = tier1
        self._tier2 = tier2
        self._scrubber = scrubber
        self._chain = chain
        self._spare = frozenset(chain)
        self._wanted = wanted
        self._mapped = mapped

    async def read(self, indices: Sequence[int]) -> AsyncGenerator[Given, None]:
        """One answer for each of distinct indices, in this order, as soon as it is here."""
        chain = self._chain
        self._tier1.index.touch([chain[index] for index in sorted(indices)])
        absent = deque(index for index in indices if self._find(index) is None)
        async with aclosing(self._read_below(tuple(absent))) as below:
            for index in indices:
                if absent and absent[0] == index:
                    absent.popleft()
                    given = self._pass_on(await anext(below))
                else:
                    given = self._give(index, self._find(index))
                self._count(given)
                yield given

    async def _read_below(self, indices: Sequence[int]) -> AsyncGenerator[Found, None]:
        if self._tier2 is None or not indices:
            for index in indices:
                yield Found(index, "missing")
            return
        async with aclosing(self._tier2.get_many(self._chain, indices, self._wanted)) as found:
            async for each in found:
                yield each

    def _find(self, index: int) -> Record | None:
        return self._tier1.find(self._chain[index], index, self._wanted)

    def _give(self, index: int, record: Record | None) -> Given:
        if record is None:
            return Given(index)
        key = record.block.storage_key
        if self._mapped:
            self._scrubber.look_at(record)
            return Given(index, record, place=self._tier1.lease(key))
        data = self._tier1.copy(key, record)
        return Given(index) if data is None else Given(index, record, data=data)

    def _pass_on(self, found: Found) -> Given:
        """A block of L2, through L1 if that has room; else it would be of no use to anybody."""
        index, _, record, payload = found
        # Another call may have brought it meanwhile.
        kept = self._find(index) or self._keep(found)
        if kept is not None:
            return self._give(index, kept)._replace(from_l2=record is not None)
        if record is None or payload is None or len(payload) > MAX_SENT_BYTES:
            return Given(index)
        return Given(index, record, data=payload.tobytes(), from_l2=True)

    def _keep(self, found: Found) -> Record | None:
        """Bring it into L1. None when it is not there, or L1 does not take it."""
        tier1, (index, _, record, payload) = self._tier1, found
        if record is None or payload is None or self._chain[index] in tier1.index:
            return None
        parent = self._chain[index - 1] if index else b""
        place = tier1.reserve(record.block, parent, record.tenant, self._spare)
        if place is not None:
            tier1.arena.write(place.slot, payload)
            tier1.publish([record])
        tier1.tell()
        return record if place is not None else None

    def _count(self, given: Given) -> None:
        counters = self._tier1.counters
        if given.record is None or given.from_l2:
            counters.num_misses += 1
            index = given.chain_index
            reason = self._tier1.mismatch(self._chain[index], index, self._wanted)
            if reason:
                counters.rejected[reason] += 1
        else:
            counters.hit(given.record.tenant, given.record.block.num_bytes)

"""Putting blocks, in two phases: reserve places, fill them, commit.

A writer holds what it has reserved for as long as it lives and no longer; whoever made
it leaves it, however the call ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvstore.memory_tier import MemoryTier
from kvstore.tier2 import Record
from services.core.errors import InvalidArgument
from services.core.kvblocks import Block, Buffer, Place

# One writer holds this share of the slots at most: a hung one must not starve the others.
MAX_SHARE = 0.25
# A prompt's blocks come piece by piece; a piece that follows another so soon is not
# another use of what is before it.
SAME_PROMPT_S = 10.0


class State(Enum):
    RESERVED = "reserved"
    # It is here, or another writer is bringing one of its key.
    PRESENT = "present"
    REFUSED = "refused"


class Reservation(NamedTuple):
    state: State
    place: Place | None = None


class NewBlock(NamedTuple):
    block: Block
    tenant: str


class Finished(NamedTuple):
    """A block that its writer has finished. `data` is None when it lies in the arena."""

    storage_key: bytes
    checksum: bytes
    data: Buffer | None


class _Reserved(NamedTuple):
    block: Block
    tenant: str
    slot: int
    # Storage keys up to this block at least.
    chain: Sequence[bytes]


class Writer:
    """`keep_below`: hands a committed block on to the tier below."""

    def __init__(
        self,
        tier: MemoryTier,
        threads: Executor,
        keep_below: Callable[[Sequence[bytes], Record], None],
    ) -> None:
        self._tier = tier
        self._threads = threads
        self._keep_below = keep_below
        self._reserved: dict[bytes, _Reserved] = {}

    def reserve(self, new: Sequence[NewBlock], chain: Sequence[bytes]) -> list[Reservation]:
        """`chain`: storage keys up to the last of these blocks."""
        first = min((each.block.index for each in new), default=0)
        if first and not self._goes_on(chain[first - 1]):
            self._tier.index.touch(chain[:first])
        spare = frozenset(chain)
        reservations = [self._reserve_one(*each, chain, spare) for each in new]
        self._tier.tell()
        return reservations

    async def commit(self, finished: Sequence[Finished]) -> int:
        """Verify and publish; how many verified. The others' places are free again.

        Raises InvalidArgument for a block that this writer has not reserved.
        """
        writes = list(zip(self._take(finished), finished, strict=True))
        work = partial(self._write_and_verify, writes)
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._threads, work)
        try:
            reasons = await asyncio.shield(writing)
        except BaseException:
            # The thread may write yet: its places are free when it has ended.
            writing.add_done_callback(lambda _: self._release(r for r, _ in writes))
            raise
        sound = []
        for (reserved, each), reason in zip(writes, reasons, strict=True):
            if reason:
                self._tier.counters.rejected[reason] += 1
                self._release([reserved])
            else:
                record = Record(reserved.block, reserved.tenant, each.checksum)
                sound.append((record, reserved.chain))
        sound.sort(key=lambda pair: pair[0].block.index)
        self._tier.publish([record for record, _ in sound])
        self._tier.tell()
        for record, chain in sound:
            self._keep_below(chain, record)
        return len(sound)

    def release(self) -> None:
        """Give back what is reserved. May be called twice."""
        reserved, self._reserved = list(self._reserved.values()), {}
        self._release(reserved)

    def _goes_on(self, parent: bytes) -> bool:
        return self._tier.index.came_within(parent, SAME_PROMPT_S, time.monotonic())

    def _reserve_one(
        self, block: Block, tenant: str, chain: Sequence[bytes], spare: frozenset[bytes]
    ) -> Reservation:
        key = block.storage_key
        self._tier.make_way(block)
        if key in self._tier.index:
            return Reservation(State.PRESENT)
        if len(self._reserved) >= self._max_reserved:
            self._tier.counters.rejected["no_room"] += 1
            return Reservation(State.REFUSED)
        parent = chain[block.index - 1] if block.index else b""
        place = self._tier.reserve(block, parent, tenant, spare)
        if place is None:
            return Reservation(State.REFUSED)
        self._reserved[key] = _Reserved(block, tenant, place.slot, chain)
        return Reservation(State.RESERVED, place)

    @property
    def _max_reserved(self) -> int:
        arena = self._tier.arena
        return max(1, int(arena.layout.num_slots * MAX_SHARE)) if arena.is_laid_out else 1

    def _take(self, finished: Sequence[Finished]) -> list[_Reserved]:
        """All of them, or none."""
        keys = [each.storage_key for each in finished]
        for key, times in Counter(keys).items():
            if key not in self._reserved or times > 1:
                raise InvalidArgument.of(
                    "commit.blocks.storage_key", f"is not reserved by this call: {key.hex()}"
                )
        return [self._reserved.pop(key) for key in keys]

    def _write_and_verify(self, writes: Sequence[tuple[_Reserved, Finished]]) -> list[str]:
        """In a thread: bytes of a block are megabytes. A reason for each that is not sound."""
        reasons = []
        for reserved, (_, checksum, data) in writes:
            num_bytes = reserved.block.num_bytes
            if data is not None and len(data) != num_bytes:
                reasons.append("size")
                continue
            if data is not None:
                self._tier.arena.write(reserved.slot, data)
            sound = self._tier.arena.verify(reserved.slot, num_bytes, checksum)
            reasons.append("" if sound else "checksum")
        return reasons

    def _release(self, reserved: Iterable[_Reserved]) -> None:
        for each in reserved:
            self._tier.release(each.block.storage_key)

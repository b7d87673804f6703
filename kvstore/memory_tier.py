"""L1: the arena, what lies where in it, and who is told.

Everything here is done between two awaits: no state is ever half changed.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from kvstore.arena import Arena
from kvstore.counters import Counters
from kvstore.eviction import POLICIES
from kvstore.index import BlockIndex
from kvstore.tier2 import Record, Wanted
from services.core.kvblocks import Block, Place, difference
from services.runtime.changes import KeyFeed


class MemoryTier:
    """`policy`: a name in POLICIES."""

    def __init__(self, *, capacity_bytes: int, policy: str, max_tenant_share: float) -> None:
        self.arena = Arena(capacity_bytes)
        self.counters = Counters()
        self.incarnation = uuid.uuid4().hex
        self._policy = POLICIES[policy]
        self._max_tenant_share = max_tenant_share
        self.index = self._new_index()
        self.feed = KeyFeed(self.index.prefix_keys, self.incarnation)
        # Told which prefixes have gone, between two awaits too.
        self.on_gone: Callable[[Collection[bytes]], None] | None = None

    def set_tenant_share(self, share: float) -> None:
        self._max_tenant_share = self.index.max_tenant_share = share

    def reserve(
        self, block: Block, parent: bytes, tenant: str, spare: Collection[bytes] = ()
    ) -> Place | None:
        """A place for a block that is to come; None, and counted, when there is none.

        Blocks here are of one size: any size is taken while none is here or on its way.
        """
        num_bytes, arena = block.num_bytes, self.arena
        if not arena.takes(num_bytes) and self.index.is_empty and arena.has_room_for(num_bytes):
            self._lay_out(num_bytes)
        if not arena.takes(num_bytes):
            self.counters.rejected["slot_size"] += 1
            return None
        slot = self.index.reserve(block.storage_key, parent, tenant, time.monotonic(), spare)
        if slot is None:
            self.counters.rejected["no_room"] += 1
            return None
        return arena.begin(slot)

    def publish(self, records: Sequence[Record]) -> None:
        """Reserved blocks whose bytes have been verified."""
        for block, _, checksum in records:
            self.arena.publish(self.index.slot_of(block.storage_key), block, checksum)
            self.counters.bytes_written += block.num_bytes
        self.index.commit(records)

    def release(self, key: bytes) -> None:
        """Give a reserved place back. Its slot is used again after all others."""
        self.index.release(key)

    def make_way(self, block: Block) -> None:
        """Drop what lies under this block's key and is another one: nobody can be given it."""
        entry = self.index.find(block.storage_key)
        if entry is not None and entry.record is not None and entry.record.block != block:
            self.reject(block.storage_key, difference(entry.record.block, block))

    def find(self, key: bytes, chain_index: int, wanted: Wanted) -> Record | None:
        """A block that is here and is what is wanted, its bytes aside.

        One whose header is damaged is dropped and counted; another one than is wanted stays.
        """
        entry = self.index.find(key)
        if entry is None or entry.record is None:
            return None
        block, _, checksum = entry.record
        if not self.arena.header_is_whole(entry.slot, block, checksum):
            self.reject(key, "header")
            return None
        return None if self.mismatch(key, chain_index, wanted) else entry.record

    def mismatch(self, key: bytes, chain_index: int, wanted: Wanted) -> str:
        """In what a block that is here is not the one wanted; "" if in nothing, or if none is."""
        entry = self.index.find(key)
        if entry is None or entry.record is None:
            return ""
        block = entry.record.block
        expected = dataclasses.replace(
            block,
            storage_key=key,
            fingerprint=wanted.fingerprint,
            index=chain_index,
            num_bytes=wanted.num_bytes,
        )
        return difference(block, expected)

    def lease(self, key: bytes) -> Place:
        """Where a block lies, for a reader who copies it now."""
        self.index.lease(key, time.monotonic())
        return self.arena.place(self.index.slot_of(key))

    def copy(self, key: bytes, record: Record) -> bytes | None:
        """A block's bytes. None, and the block is dropped, when they do not verify."""
        into = np.empty(record.block.num_bytes, dtype=np.uint8)
        problem = self.arena.copy(self.index.slot_of(key), record.block, into)
        if problem:
            self.reject(key, problem)
            return None
        return into.tobytes()

    def reject(self, key: bytes, reason: str) -> None:
        """Drop a block that does not verify."""
        self.counters.rejected[reason] += 1
        self.drop([key])

    def drop(self, keys: Iterable[bytes]) -> int:
        """How many of them were here."""
        found = [key for key in keys if self.index.find(key) is not None]
        for key in found:
            self.arena.begin(self.index.drop(key))
        self.tell()
        return len(found)

    def tell(self) -> None:
        """Tell whoever watches what has changed, and count what was evicted."""
        self.counters.evicted(self.index.take_evicted())
        changes = self.index.take_changes()
        self.feed.publish(added=changes.stored, removed=changes.evicted)
        if changes.evicted and self.on_gone is not None:
            self.on_gone(changes.evicted)

    def prefixes_of(self, keys: Iterable[bytes]) -> set[bytes]:
        """Of the blocks among them that are here."""
        entries = map(self.index.find, keys)
        return {each.record.block.prefix_key for each in entries if each and each.record}

    def check_integrity(self) -> None:
        self.index.check_integrity()
        assert set(self.feed.keys) == set(self.index.prefix_keys)

    def close(self) -> None:
        """May be called twice."""
        self.feed.close()
        self.arena.close()

    def _lay_out(self, num_bytes: int) -> None:
        assert self.index.is_empty
        # What has gone and is not told yet, only this index knows.
        self.tell()
        self.arena.lay_out(num_bytes)
        self.index = self._new_index()
        self.feed.keys = self.index.prefix_keys

    def _new_index(self) -> BlockIndex:
        num_slots = self.arena.layout.num_slots
        return BlockIndex(num_slots, self._policy, max_tenant_share=self._max_tenant_share)

"""Which block lies in which slot of the arena. Pure: bookkeeping only, time is given.

A slot is free, reserved by a writer, or holds a block that can be found. Of a chain
only the last block here may go: a tail is worth nothing without its head.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.eviction import EvictionPolicy
from kvstore.tier2 import Record

# Blocks given to a reader go last, for as long as a copy may take.
LEASE_S = 1.0
# Writers hold half of the slots at most: what they hold cannot be evicted.
MAX_RESERVED_SHARE = 0.5


@dataclass(slots=True)
class Entry:
    slot: int
    tenant: str
    # Storage key of the block before it, b"" for the first of a chain.
    parent: bytes
    # None: reserved, not written yet.
    record: Record | None = None


class Changes(NamedTuple):
    """Prefix keys that came and went, net, in order (as keys of a dict)."""

    stored: dict[bytes, None]
    evicted: dict[bytes, None]


class BlockIndex:
    """`max_tenant_share` may be changed at any time."""

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, *, max_tenant_share: float = 1.0
    ) -> None:
        self.num_slots = num_slots
        self.max_tenant_share = max_tenant_share
        self._policy = policy
        # A slot that was given back is used last: a writer that was cut off may still write.
        self._free = deque(range(num_slots))
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._num_reserved = 0
        # Slots by tenant, reserved ones included.
        self._slots_of: Counter[str] = Counter()
        self._leases: OrderedDict[bytes, float] = OrderedDict()
        # One prefix may be here several times, computed by different engines.
        self._prefixes: Counter[bytes] = Counter()
        self._changes = Changes({}, {})
        self._evicted: Counter[str] = Counter()

    @property
    def num_blocks(self) -> int:
        return len(self._entries) - self._num_reserved

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def prefix_keys(self) -> Collection[bytes]:
        return self._prefixes.keys()

    def tenants(self) -> dict[str, int]:
        """Slots in use by tenant."""
        return dict(self._slots_of)

    def __contains__(self, key: bytes) -> bool:
        """It is here, or on its way."""
        return key in self._entries

    def find(self, key: bytes) -> Entry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and entry.record is not None else None

    def match(self, chain: Sequence[bytes]) -> int:
        """How many blocks are here, from the chain's start without a gap."""
        return next(
            (length for length, key in enumerate(chain) if self.find(key) is None), len(chain)
        )

    def touch(self, chain: Iterable[bytes]) -> None:
        """These blocks, in chain order, were used."""
        for key in reversed([key for key in chain if self.find(key) is not None]):
            self._policy.touch(key)

    def lease(self, key: bytes, now_s: float) -> None:
        """It is given to a reader, who copies it now."""
        self._leases[key] = now_s + LEASE_S
        self._leases.move_to_end(key)

    def reserve(
        self, key: bytes, parent: bytes, tenant: str, now_s: float, spare: Collection[bytes] = ()
    ) -> int | None:
        """A slot for a block that is to come, evicting another one if need be.

        None when there is no room: for this tenant, or without evicting one of `spare`.
        """
        assert key not in self._entries
        if self._num_reserved >= max(1, int(self.num_slots * MAX_RESERVED_SHARE)):
            return None
        full = self._slots_of[tenant] >= max(1, math.floor(self.num_slots * self.max_tenant_share))
        if (full or not self._free) and not self._evict_for(tenant if full else None, now_s, spare):
            return None
        slot = self._free.popleft()
        self._entries[key] = Entry(slot, tenant, parent)
        self._children.setdefault(parent, {})[key] = None
        self._slots_of[tenant] += 1
        self._num_reserved += 1
        return slot

    def slot_of(self, key: bytes) -> int:
        """Of a block that is here or on its way."""
        return self._entries[key].slot

    def commit(self, records: Sequence[Record]) -> None:
        """Reserved blocks, in chain order: they can be found now."""
        for record in records:
            entry = self._entries[record.block.storage_key]
            assert entry.record is None
            entry.record = record
            self._num_reserved -= 1
            self._add_prefix(record.block.prefix_key)
        for record in reversed(records):
            self._policy.insert(record.block.storage_key)

    def release(self, key: bytes) -> int:
        """Give a reserved slot back, unwritten. Returns the slot."""
        entry = self._entries[key]
        assert entry.record is None
        self._num_reserved -= 1
        return self._free_slot(key, entry)

    def drop(self, key: bytes) -> int:
        """Remove a block. Returns its slot."""
        return self._remove(key, evicted=False)

    def keys(self, tenant: str | None = None) -> list[bytes]:
        """Of the blocks of a tenant, or of all."""
        return [
            key
            for key, entry in self._entries.items()
            if entry.record is not None and tenant in (None, entry.tenant)
        ]

    def take_evicted(self) -> Counter[str]:
        """Blocks evicted since the last call, by tenant."""
        evicted, self._evicted = self._evicted, Counter()
        return evicted

    def take_changes(self) -> Changes:
        """What came and went since the last call."""
        changes, self._changes = self._changes, Changes({}, {})
        return changes

    def check_integrity(self) -> None:
        used = [entry.slot for entry in self._entries.values()]
        assert sorted([*used, *self._free]) == list(range(self.num_slots))
        reserved = sum(entry.record is None for entry in self._entries.values())
        assert reserved == self._num_reserved
        assert +self._slots_of == Counter(entry.tenant for entry in self._entries.values())
        found = [entry.record.block for entry in self._entries.values() if entry.record]
        assert self._prefixes == Counter(block.prefix_key for block in found)
        children = {(entry.parent, key) for key, entry in self._entries.items()}
        listed = {(p, key) for p, under in self._children.items() for key in under}
        assert children == listed
        assert len(self._policy) == self.num_blocks
        assert all(key in self._policy for key in self.keys())

    def _evict_for(self, tenant: str | None, now_s: float, spare: Collection[bytes]) -> bool:
        """Evict one block, of this tenant if one is named."""
        self._forget_leases(now_s)
        for held in (self._leases, ()):
            for key in self._policy.candidates():
                leaf = self._leaf(key)
                entry = self._entries[leaf]
                if (
                    entry.record is not None
                    and leaf not in held
                    and leaf not in spare
                    and tenant in (None, entry.tenant)
                ):
                    self._evicted[entry.tenant] += 1
                    self._remove(leaf, evicted=True)
                    return True
            if not self._leases:
                break
        return False

    def _leaf(self, key: bytes) -> bytes:
        """The end of a chain through `key`."""
        while children := self._children.get(key):
            key = next(iter(children))
        return key

    def _forget_leases(self, now_s: float) -> None:
        while self._leases:
            key, until_s = next(iter(self._leases.items()))
            if until_s > now_s:
                return
            del self._leases[key]

    def _remove(self, key: bytes, *, evicted: bool) -> int:
        entry = self._entries[key]
        assert entry.record is not None
        self._policy.remove(key, evicted=evicted)
        self._leases.pop(key, None)
        self._remove_prefix(entry.record.block.prefix_key)
        return self._free_slot(key, entry)

    def _free_slot(self, key: bytes, entry: Entry) -> int:
        del self._entries[key]
        siblings = self._children[entry.parent]
        del siblings[key]
        if not siblings:
            del self._children[entry.parent]
        self._slots_of[entry.tenant] -= 1
        if not self._slots_of[entry.tenant]:
            del self._slots_of[entry.tenant]
        self._free.append(entry.slot)
        return entry.slot

    def _add_prefix(self, prefix_key: bytes) -> None:
        self._prefixes[prefix_key] += 1
        if self._prefixes[prefix_key] == 1:
            self._note(prefix_key, self._changes.evicted, self._changes.stored)

    def _remove_prefix(self, prefix_key: bytes) -> None:
        self._prefixes[prefix_key] -= 1
        if not self._prefixes[prefix_key]:
            del self._prefixes[prefix_key]
            self._note(prefix_key, self._changes.stored, self._changes.evicted)

    def _note(self, prefix_key: bytes, undone: dict[bytes, None], done: dict[bytes, None]) -> None:
        if undone.pop(prefix_key, self) is self:
            done[prefix_key] = None

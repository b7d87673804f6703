"""Which block lies in which slot of the arena. Pure: bookkeeping only, time is given.

A slot is free, reserved by a writer, or holds a block that can be found. Of a chain
only the last block here may go: a tail is worth nothing without its head.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvstore.eviction import EvictionPolicy
from kvstore.prefixes import Changes, Prefixes
from kvstore.tier2 import Record

# Blocks given to a reader go last, for as long as a copy may take.
LEASE_S = 1.0
# Writers hold half of the slots at most: what they hold cannot be evicted.
MAX_RESERVED_SHARE = 0.5
# A tenant over its share gives up so many blocks for a new one: a share that was
# lowered is reached step by step.
MAX_EVICTED_FOR_ONE = 2


@dataclass(slots=True)
class Entry:
    slot: int
    tenant: str
    # Storage key of the block before it, b"" for the first of a chain.
    parent: bytes
    reserved_s: float
    # None: not written yet.
    record: Record | None = None


class BlockIndex:
    """`max_tenant_share` may be changed at any time. `new_policy`: for so many blocks."""

    def __init__(
        self,
        num_slots: int,
        new_policy: Callable[[int], EvictionPolicy],
        *,
        max_tenant_share: float = 1.0,
    ) -> None:
        self.num_slots = num_slots
        self.max_tenant_share = max_tenant_share
        self._new_policy = new_policy
        self._policy = new_policy(num_slots)
        # Of tenants that have come to their share: they push out blocks of their own.
        self._own_policies: dict[str, EvictionPolicy] = {}
        # Slots are taken in order, the first time.
        self._num_taken = 0
        # A slot that was given back is used last: a writer that was cut off may still write.
        self._given_back: deque[int] = deque()
        self._entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._num_reserved = 0
        # Slots by tenant, reserved ones included.
        self._slots_of: Counter[str] = Counter()
        self._leases: OrderedDict[bytes, float] = OrderedDict()
        self._prefixes = Prefixes()
        self._evicted: Counter[str] = Counter()

    @property
    def num_blocks(self) -> int:
        return len(self._entries) - self._num_reserved

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def is_empty(self) -> bool:
        """No block is here or on its way."""
        return not self._entries

    @property
    def prefix_keys(self) -> Collection[bytes]:
        return self._prefixes.keys

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

    def came_within(self, key: bytes, seconds: float, now_s: float) -> bool:
        """Whether it is here, or on its way, and has not been for long."""
        entry = self._entries.get(key)
        return entry is not None and now_s - entry.reserved_s < seconds

    def touch(self, chain: Iterable[bytes]) -> None:
        """These blocks, in chain order, were used."""
        found = [(key, entry) for key in chain if (entry := self.find(key)) is not None]
        for key, entry in reversed(found):
            for policy in self._policies_of(entry.tenant):
                policy.touch(key)

    def lease(self, key: bytes, now_s: float) -> None:
        """It is given to a reader, who copies it now."""
        self._leases[key] = now_s + LEASE_S
        self._leases.move_to_end(key)

    def reserve(
        self, key: bytes, parent: bytes, tenant: str, now_s: float, spare: Collection[bytes] = ()
    ) -> int | None:
        """A slot for a block that is to come, evicting others if need be.

        None when there is no room: for this tenant, or without evicting one of `spare`.
        """
        assert key not in self._entries
        if self._num_reserved >= max(1, int(self.num_slots * MAX_RESERVED_SHARE)):
            return None
        if not self._make_room(tenant, now_s, spare):
            return None
        slot = self._free_slot()
        self._entries[key] = Entry(slot, tenant, parent, now_s)
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
            self._prefixes.add(record.block.prefix_key)
        for record in reversed(records):
            for policy in self._policies_of(self._entries[record.block.storage_key].tenant):
                policy.insert(record.block.storage_key)

    def release(self, key: bytes) -> int:
        """Give a reserved slot back, unwritten. Returns the slot."""
        entry = self._entries[key]
        assert entry.record is None
        self._num_reserved -= 1
        return self._give_back(key, entry)

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
        """Prefixes that came and went since the last call."""
        return self._prefixes.take_changes()

    def check_integrity(self) -> None:
        used = [entry.slot for entry in self._entries.values()]
        assert sorted([*used, *self._given_back]) == list(range(self._num_taken))
        assert self._num_taken <= self.num_slots
        reserved = sum(entry.record is None for entry in self._entries.values())
        assert reserved == self._num_reserved
        assert self._slots_of == Counter(entry.tenant for entry in self._entries.values())
        self._prefixes.check_integrity(
            [entry.record.block.prefix_key for entry in self._entries.values() if entry.record]
        )
        children = {(entry.parent, key) for key, entry in self._entries.items()}
        assert children == {(p, key) for p, under in self._children.items() for key in under}
        assert all(self._children.values())
        assert self._leases.keys() <= self._entries.keys()
        for tenant, policy in [(None, self._policy), *self._own_policies.items()]:
            keys = self.keys(tenant)
            assert len(policy) == len(keys)
            assert all(key in policy for key in keys)

    def _make_room(self, tenant: str, now_s: float, spare: Collection[bytes]) -> bool:
        """For one more block of the tenant."""
        num_over = 1 + self._slots_of[tenant] - self._most_slots
        if num_over <= 0 or self._most_slots == self.num_slots:
            return self._has_free_slot or self._evict_one(self._policy, now_s, spare)
        for _ in range(min(num_over, MAX_EVICTED_FOR_ONE)):
            if not self._evict_one(self._own_policy(tenant), now_s, spare):
                return False
        return True

    @property
    def _most_slots(self) -> int:
        """Of one tenant."""
        return max(1, int(self.num_slots * self.max_tenant_share))

    def _own_policy(self, tenant: str) -> EvictionPolicy:
        own = self._own_policies.get(tenant)
        if own is None:
            own = self._own_policies[tenant] = self._new_policy(self._most_slots)
            for key in self.keys(tenant):
                own.insert(key)
        return own

    def _policies_of(self, tenant: str) -> tuple[EvictionPolicy, ...]:
        own = self._own_policies.get(tenant)
        return (self._policy,) if own is None else (self._policy, own)

    def _evict_one(self, policy: EvictionPolicy, now_s: float, spare: Collection[bytes]) -> bool:
        self._forget_leases(now_s)
        for held in (self._leases, ()) if self._leases else ((),):
            seen: set[bytes] = set()
            for key in policy.candidates():
                leaf = self._leaf(key, seen)
                if leaf is not None and leaf not in held and leaf not in spare:
                    self._evicted[self._entries[leaf].tenant] += 1
                    self._remove(leaf, evicted=True)
                    return True
        return False

    def _leaf(self, key: bytes, seen: set[bytes]) -> bytes | None:
        """The end of a chain through `key`; None when it is not written yet, or was seen.

        Of a ring, which writers of contrary chains make, any block is an end.
        """
        walked = set()
        while key not in seen:
            seen.add(key)
            walked.add(key)
            children = self._children.get(key)
            if not children:
                return key if self.find(key) is not None else None
            key = next(iter(children))
        return key if key in walked and self.find(key) is not None else None

    def _forget_leases(self, now_s: float) -> None:
        while self._leases:
            key, until_s = next(iter(self._leases.items()))
            if until_s > now_s:
                return
            del self._leases[key]

    def _remove(self, key: bytes, *, evicted: bool) -> int:
        entry = self._entries[key]
        assert entry.record is not None
        for policy in self._policies_of(entry.tenant):
            policy.remove(key, evicted=evicted)
        self._leases.pop(key, None)
        self._prefixes.remove(entry.record.block.prefix_key)
        return self._give_back(key, entry)

    @property
    def _has_free_slot(self) -> bool:
        return self._num_taken < self.num_slots or bool(self._given_back)

    def _free_slot(self) -> int:
        if self._num_taken < self.num_slots:
            self._num_taken += 1
            return self._num_taken - 1
        return self._given_back.popleft()

    def _give_back(self, key: bytes, entry: Entry) -> int:
        del self._entries[key]
        siblings = self._children[entry.parent]
        del siblings[key]
        if not siblings:
            del self._children[entry.parent]
        self._slots_of[entry.tenant] -= 1
        if not self._slots_of[entry.tenant]:
            del self._slots_of[entry.tenant]
        if 2 * self._slots_of[entry.tenant] < self._most_slots:
            self._own_policies.pop(entry.tenant, None)
        self._given_back.append(entry.slot)
        return entry.slot

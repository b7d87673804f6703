"""The block pool: KV blocks kept for reuse, by storage key.

Pure bookkeeping over one array of bytes. Eviction is least recently used, tails
of a prefix before their heads, since a tail is worth nothing without its head.
Every entry into and exit from the pool is remembered as an event, net of what
came and went unreported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from worker.engines.contract import Bytes, Generations
from worker.messages import StoredBlock


class NewBlock(NamedTuple):
    """A block to keep: its key in this pool, and the prefix it is known by outside."""

    storage_key: bytes
    prefix_key: bytes


class PoolEvents(NamedTuple):
    """In order; of the evicted, their prefix keys."""

    stored: list[StoredBlock]
    evicted: list[bytes]


@dataclass(slots=True, eq=False)
class Claim:
    """What a running request has of the pool: cached blocks, and room for those to come.

    The first `num_pinned` blocks of `chain` stay while it runs, and count once however
    many requests have pinned them.
    """

    chain: Sequence[NewBlock] = ()
    num_pinned: int = 0
    num_reserved: int = 0


class Kept(NamedTuple):
    """Where the bytes of a sequence's blocks first, first + 1, ... are to be written."""

    first: int
    places: list[Bytes]


@dataclass(slots=True, eq=False)
class _Block:
    place: int
    prefix_key: bytes
    num_pins: int = 0


class BlockPool:
    """`memory`: uint8 of shape (num_blocks, block_bytes).

    `generations`, of shape (num_blocks,), counts up before a place is overwritten, for
    processes that copy from it. None: nobody does.
    With a paged engine the KV of running requests occupies blocks too: each has a claim.
    Cached blocks that no claim has pinned are evicted for one, since cached KV always
    yields to requests.
    """

    def __init__(self, memory: Bytes, generations: Generations | None = None) -> None:
        self._memory = memory
        self._generations = np.zeros(len(memory), np.uint64) if generations is None else generations
        self._free = list(range(memory.shape[0]))
        self._cached: dict[bytes, _Block] = {}
        # Those that nobody has pinned, least recently used first.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._num_reserved = 0
        self._stored: dict[bytes, StoredBlock] = {}
        self._evicted: dict[bytes, None] = {}

    @property
    def num_blocks(self) -> int:
        return int(self._memory.shape[0])

    @property
    def num_cached(self) -> int:
        """The pinned ones among them."""
        return len(self._cached)

    @property
    def num_pinned(self) -> int:
        return len(self._cached) - len(self._idle)

    @property
    def num_reserved(self) -> int:
        """Room that running requests have, beside the blocks they have pinned."""
        return self._num_reserved

    def has(self, block: NewBlock) -> bool:
        return block.storage_key in self._cached

    def length(self, chain: Sequence[NewBlock], start: int = 0) -> int:
        """How many blocks are here, from the chain's start without a gap.

        Those before `start` are taken for granted.
        """
        while start < len(chain) and chain[start].storage_key in self._cached:
            start += 1
        return start

    def use(self, chain: Sequence[NewBlock]) -> None:
        """Evict these later than others."""
        for block in reversed(chain):
            if block.storage_key in self._idle:
                self._idle.move_to_end(block.storage_key)

    def match(self, chain: Sequence[NewBlock]) -> int:
        """As `length`; they count as used."""
        length = self.length(chain)
        self.use(chain[:length])
        return length

    def read(self, chain: Sequence[NewBlock]) -> list[Bytes]:
        """The bytes of blocks that are here.

        Valid while they are pinned, or until the next `store`, `keep` or `claim`.
        """
        return [self._memory[self._cached[block.storage_key].place] for block in chain]

    # For engines that have their KV elsewhere: the pool is a cache and nothing else.

    def store(self, chain: Sequence[NewBlock], first: int) -> list[Bytes]:
        """Make room for chain[first:] and return where to write each block's bytes.

        As many as fit without evicting the chain's own start; the rest is left out.
        The caller fills them before it calls anything else.
        """
        own = {block.storage_key for block in chain[:first]}
        places: list[Bytes] = []
        for index, block in enumerate(chain[first:], start=first):
            if self.has(block):
                break  # the rest came in by another request in the meantime
            if not self._have_room(1, own):
                break
            own.add(block.storage_key)
            places.append(self._add(chain, index))
            self._idle[block.storage_key] = None
        self.use(chain[: first + len(places)])
        return places

    # For paged engines.

    def claim(self, chain: Sequence[NewBlock], num_blocks: int) -> Claim | None:
        """Take `num_blocks` for a running request: what is cached of `chain`, and room.

        None, and nothing taken, when they cannot be had.
        """
        have = chain[: min(self.length(chain), num_blocks)]
        num_idle = sum(block.storage_key in self._idle for block in have)
        room = len(self._free) + len(self._idle) - num_idle - self._num_reserved
        if num_blocks - len(have) > room:
            return None
        claim = Claim(chain)
        for block in have:
            self._pin(block)
        claim.num_pinned = len(have)
        claim.num_reserved = num_blocks - len(have)
        self._have_room(claim.num_reserved)
        self._num_reserved += claim.num_reserved
        return claim

    def pin_more(self, claim: Claim, chain: Sequence[NewBlock]) -> None:
        """Pin what else is cached of `chain`, instead of the room for it.

        `chain` begins as the one claimed, and becomes that.
        """
        claim.chain = chain
        while claim.num_reserved and claim.num_pinned < len(chain):
            block = chain[claim.num_pinned]
            if not self.has(block):
                break
            self._pin(block)
            self._move(claim)

    def keep(self, claim: Claim, chain: Sequence[NewBlock]) -> Kept:
        """Let chain[claim.num_pinned:] be cached, in the room that the claim has for it.

        The caller writes their bytes before it calls anything else.
        """
        self.pin_more(claim, chain)
        first, places = claim.num_pinned, []
        while claim.num_reserved and claim.num_pinned < len(chain):
            if self.has(chain[claim.num_pinned]):
                break  # for the next call: the places go without a gap
            places.append(self._add(chain, claim.num_pinned, num_pins=1))
            self._move(claim)
        return Kept(first, places)

    def release(self, claim: Claim) -> None:
        """Its blocks stay cached until others need the room."""
        for block in reversed(claim.chain[: claim.num_pinned]):
            cached = self._cached[block.storage_key]
            cached.num_pins -= 1
            if not cached.num_pins:
                self._idle[block.storage_key] = None
        self._num_reserved -= claim.num_reserved
        claim.num_pinned = claim.num_reserved = 0

    def take_events(self) -> PoolEvents:
        """What changed since the last call."""
        events = PoolEvents(list(self._stored.values()), list(self._evicted))
        self._stored, self._evicted = {}, {}
        return events

    def check_integrity(self, claims: Sequence[Claim] | None = None) -> None:
        """`claims`: all that there are, if they are known."""
        used = [block.place for block in self._cached.values()]
        assert sorted(used + self._free) == list(range(self.num_blocks))
        assert 0 <= self._num_reserved <= len(self._free)
        assert self._idle.keys() == {k for k, block in self._cached.items() if not block.num_pins}
        assert not self._stored.keys() & self._evicted.keys()
        cached = {block.prefix_key for block in self._cached.values()}
        assert self._stored.keys() <= cached
        assert not self._evicted.keys() & cached
        if claims is not None:
            assert self._num_reserved == sum(claim.num_reserved for claim in claims)
            num_pins = sum(claim.num_pinned for claim in claims)
            assert num_pins == sum(block.num_pins for block in self._cached.values())
            for claim in claims:
                assert self.length(claim.chain[: claim.num_pinned]) == claim.num_pinned

    def _pin(self, block: NewBlock) -> None:
        self._cached[block.storage_key].num_pins += 1
        self._idle.pop(block.storage_key, None)

    def _move(self, claim: Claim) -> None:
        """A block that was to come is there, and pinned."""
        claim.num_pinned += 1
        claim.num_reserved -= 1
        self._num_reserved -= 1

    def _add(self, chain: Sequence[NewBlock], index: int, *, num_pins: int = 0) -> Bytes:
        block, place = chain[index], self._free.pop()
        self._cached[block.storage_key] = _Block(place, block.prefix_key, num_pins)
        self._generations[place] += 1
        if self._evicted.pop(block.prefix_key, self) is self:
            self._stored[block.prefix_key] = StoredBlock(
                prefix_key=block.prefix_key,
                previous_key=chain[index - 1].prefix_key if index else b"",
                block_index=index,
                place=place,
                generation=int(self._generations[place]),
            )
        view: Bytes = self._memory[place]
        return view

    def _have_room(self, num_blocks: int, spare: Container[bytes] = ()) -> bool:
        """Evict the least recently used until `num_blocks` are neither cached nor reserved."""
        while len(self._free) - self._num_reserved < num_blocks:
            victim = next((key for key in self._idle if key not in spare), None)
            if victim is None:
                return False
            del self._idle[victim]
            block = self._cached.pop(victim)
            self._free.append(block.place)
            if self._stored.pop(block.prefix_key, None) is None:
                self._evicted[block.prefix_key] = None
        return True

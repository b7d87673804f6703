"""The block pool: KV blocks kept for reuse, by storage key.

Pure bookkeeping over one array of bytes. Eviction is least recently used, tails
of a prefix before their heads, since a tail is worth nothing without its head.
Every entry into and exit from the pool is remembered as an event, net of what
came and went unreported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
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


class _Block(NamedTuple):
    place: int
    prefix_key: bytes


class BlockPool:
    """`memory`: uint8 of shape (num_blocks, block_bytes).

    `generations`, of shape (num_blocks,), counts up before a place is overwritten, for
    processes that copy from it. None: nobody does.
    With a paged engine the running requests' KV occupies blocks too: `reserve`
    takes them, evicting cached blocks, since cached KV always yields to requests.
    """

    def __init__(self, memory: Bytes, generations: Generations | None = None) -> None:
        self._memory = memory
        self._generations = np.zeros(len(memory), np.uint64) if generations is None else generations
        self._free = list(range(memory.shape[0]))
        # Least recently used first.
        self._cached: OrderedDict[bytes, _Block] = OrderedDict()
        self._num_reserved = 0
        self._stored: dict[bytes, StoredBlock] = {}
        self._evicted: dict[bytes, None] = {}

    @property
    def num_blocks(self) -> int:
        return int(self._memory.shape[0])

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    def match(self, chain: Sequence[bytes]) -> int:
        """How many blocks are here, from the chain's start without a gap; they count as used."""
        length = 0
        while length < len(chain) and chain[length] in self._cached:
            length += 1
        for key in reversed(chain[:length]):
            self._cached.move_to_end(key)
        return length

    def read(self, chain: Sequence[bytes]) -> list[Bytes]:
        """The bytes of blocks that `match` found; valid until the next `store` or `reserve`."""
        return [self._memory[self._cached[key].place] for key in chain]

    def store(self, chain: Sequence[NewBlock], first: int) -> list[Bytes]:
        """Make room for chain[first:] and return where to write each block's bytes.

        As many as fit without evicting the chain's own start; the rest is left out.
        The caller fills them before it calls anything else.
        """
        own = {block.storage_key for block in chain[:first]}
        places: list[Bytes] = []
        for index, block in enumerate(chain[first:], start=first):
            if block.storage_key in self._cached:
                break  # the rest came in by another request in the meantime
            if not self._have_room(1, spare=own):
                break
            place = self._free.pop()
            self._cached[block.storage_key] = _Block(place, block.prefix_key)
            own.add(block.storage_key)
            self._generations[place] += 1
            if self._evicted.pop(block.prefix_key, self) is self:
                self._stored[block.prefix_key] = StoredBlock(
                    prefix_key=block.prefix_key,
                    previous_key=chain[index - 1].prefix_key if index else b"",
                    block_index=index,
                    place=place,
                    generation=int(self._generations[place]),
                )
            places.append(self._memory[place])
        for block in reversed(chain[: first + len(places)]):
            self._cached.move_to_end(block.storage_key)
        return places

    def reserve(self, num_blocks: int) -> bool:
        """Take blocks for a running request; False, and nothing taken, when they cannot be had."""
        if num_blocks > self.num_blocks - self._num_reserved:
            return False
        self._have_room(num_blocks, spare=frozenset())
        self._num_reserved += num_blocks
        return True

    def release(self, num_blocks: int) -> None:
        if num_blocks > self._num_reserved:
            raise ValueError(f"{num_blocks} blocks to release, {self._num_reserved} reserved")
        self._num_reserved -= num_blocks

    def take_events(self) -> PoolEvents:
        """What changed since the last call."""
        events = PoolEvents(list(self._stored.values()), list(self._evicted))
        self._stored, self._evicted = {}, {}
        return events

    def check_integrity(self) -> None:
        used = [block.place for block in self._cached.values()]
        assert sorted(used + self._free) == list(range(self.num_blocks))
        assert 0 <= self._num_reserved <= len(self._free)
        assert not self._stored.keys() & self._evicted.keys()
        cached = {block.prefix_key for block in self._cached.values()}
        assert self._stored.keys() <= cached
        assert not self._evicted.keys() & cached

    def _have_room(self, num_blocks: int, *, spare: set[bytes] | frozenset[bytes]) -> bool:
        """Evict the least recently used until `num_blocks` are neither cached nor reserved."""
        while len(self._free) - self._num_reserved < num_blocks:
            victim = next((key for key in self._cached if key not in spare), None)
            if victim is None:
                return False
            block = self._cached.pop(victim)
            self._free.append(block.place)
            if self._stored.pop(block.prefix_key, None) is None:
                self._evicted[block.prefix_key] = None
        return True

"""Which block goes when another needs its place. Pure.

A policy orders keys by what they seem worth; the index asks for the cheapest, and may
turn some down: a block whose tail is still here, one that a reader copies just now, one
of another tenant. All policies see a chain's blocks tail first, so that of blocks used
together the head is the one kept longest.

Scans, prompts that never come again, are most of real traffic: a policy that lets each
new block push out an old one loses the shared beginnings to them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol


class EvictionPolicy(Protocol):
    """Knows the keys of all blocks in the store."""

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def insert(self, key: bytes) -> None:
        """A block came in."""
        ...

    def touch(self, key: bytes) -> None:
        """A block was used."""
        ...

    def remove(self, key: bytes, *, evicted: bool) -> None:
        """A block has gone: evicted for want of room, or dropped for another reason."""
        ...

    def candidates(self) -> Iterator[bytes]:
        """Keys, the least worth first; ends when each has been offered.

        Taking the next turns the last one down. Nothing else may be called meanwhile.
        """
        ...


class Lru:
    """Least recently used first. The baseline: one scan empties it."""

    def __init__(self, num_blocks: int) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def insert(self, key: bytes) -> None:
        self._order[key] = None

    def touch(self, key: bytes) -> None:
        self._order.move_to_end(key)

    def remove(self, key: bytes, *, evicted: bool) -> None:
        del self._order[key]

    def candidates(self) -> Iterator[bytes]:
        return iter(self._order)


class SegmentedLru:
    """Two LRU lists: a block is on probation until it is used again, then protected.

    The protected ones that are not used for long return to probation. (Karedla, Love
    and Wherry, 1994.)
    """

    PROTECTED_SHARE = 0.8

    def __init__(self, num_blocks: int) -> None:
        self._max_protected = max(1, int(num_blocks * self.PROTECTED_SHARE))
        self._probation: OrderedDict[bytes, None] = OrderedDict()
        self._protected: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: bytes) -> bool:
        return key in self._probation or key in self._protected

    def insert(self, key: bytes) -> None:
        self._probation[key] = None

    def touch(self, key: bytes) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        del self._probation[key]
        self._protected[key] = None
        if len(self._protected) > self._max_protected:
            demoted, _ = self._protected.popitem(last=False)
            self._probation[demoted] = None

    def remove(self, key: bytes, *, evicted: bool) -> None:
        if key in self._probation:
            del self._probation[key]
        else:
            del self._protected[key]

    def candidates(self) -> Iterator[bytes]:
        return itertools.chain(self._probation, self._protected)


class S3Fifo:
    """A small FIFO for what is new, a large one for what was used, and ghosts.

    A block at the end of the small one moves on if it was used meanwhile; one at the
    end of the large one gets another round for each use. (Yang et al., SOSP 2023.)

    The small one is larger than the authors' tenth, and what left it is remembered for
    longer: turns of a conversation are minutes apart, and come back as whole chains.
    """

    SMALL_SHARE = 0.25
    REMEMBERED_SHARE = 2.0
    MAX_USES = 3

    def __init__(self, num_blocks: int) -> None:
        self._max_small = max(1, int(num_blocks * self.SMALL_SHARE))
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._gone = _Ghosts(max(1, int(num_blocks * self.REMEMBERED_SHARE)))

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses

    def insert(self, key: bytes) -> None:
        (self._main if self._gone.pop(key) else self._small)[key] = None
        self._uses[key] = 0

    def touch(self, key: bytes) -> None:
        self._uses[key] = min(self._uses[key] + 1, self.MAX_USES)

    def remove(self, key: bytes, *, evicted: bool) -> None:
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        if evicted:
            self._gone.add(key)

    def candidates(self) -> Iterator[bytes]:
        if len(self._small) >= self._max_small or not self._main:
            yield from self._around_small()
            yield from self._around_main()
        else:
            yield from self._around_main()
            yield from self._around_small()

    def _around_small(self) -> Iterator[bytes]:
        for _ in range(len(self._small)):
            key = next(iter(self._small))
            if self._uses[key]:
                del self._small[key]
                self._main[key] = None
                self._uses[key] = 0
                continue
            yield key
            self._small.move_to_end(key)  # turned down: behind all others

    def _around_main(self) -> Iterator[bytes]:
        for _ in range(len(self._main) * (self.MAX_USES + 1)):
            key = next(iter(self._main))
            if self._uses[key]:
                self._uses[key] -= 1
            else:
                yield key
            self._main.move_to_end(key)


class _Ghosts:
    """The last keys that left."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def pop(self, key: bytes) -> bool:
        return self._keys.pop(key, self) is None


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {"lru": Lru, "slru": SegmentedLru, "s3fifo": S3Fifo}
)

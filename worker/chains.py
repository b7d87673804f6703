"""Which block follows which, and whose they are. Pure.

The core tells of a stored block which one it follows; whoever keeps it elsewhere
needs its whole chain, and the tenant whose share it counts against.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class _Link(NamedTuple):
    # Empty: the first of its chain.
    previous_key: bytes
    tenant: str


class Chain(NamedTuple):
    """Prefix keys from the chain's first block to the one asked for."""

    prefix_keys: list[bytes]
    tenant: str


class Chains:
    """The latest `max_blocks` blocks of which something was heard."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # Least recently heard of first; of a chain, its tail before its head.
        self._links: OrderedDict[bytes, _Link] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def add(self, prefix_keys: Sequence[bytes], tenant: str) -> None:
        """The blocks of a chain, from its first."""
        for place in reversed(range(len(prefix_keys))):
            previous_key = prefix_keys[place - 1] if place else b""
            self._put(prefix_keys[place], _Link(previous_key, tenant))

    def append(self, prefix_key: bytes, previous_key: bytes) -> None:
        """A block of the tenant whose block it follows; nothing when that is not known."""
        previous = self._links.get(previous_key)
        if previous is not None:
            self._put(prefix_key, _Link(previous_key, previous.tenant))

    def find(self, prefix_key: bytes) -> Chain | None:
        """None when part of it is not known (any more)."""
        keys: list[bytes] = []
        key, tenant = prefix_key, ""
        while key:
            link = self._links.get(key)
            if link is None:
                return None
            keys.append(key)
            key, tenant = link
        return Chain(keys[::-1], tenant)

    def _put(self, key: bytes, link: _Link) -> None:
        self._links[key] = link
        self._links.move_to_end(key)
        while len(self._links) > self._max_blocks:
            self._links.popitem(last=False)

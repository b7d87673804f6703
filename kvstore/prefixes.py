"""Which prefixes are here, and what has changed since it was last told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple


class Changes(NamedTuple):
    """Prefix keys that came and went, net, in order (as keys of a dict)."""

    stored: dict[bytes, None]
    evicted: dict[bytes, None]


class Prefixes:
    """One prefix may be here several times, computed by different engines."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._changes = Changes({}, {})

    @property
    def keys(self) -> Collection[bytes]:
        """The set itself, as it changes."""
        return self._counts.keys()

    def add(self, prefix_key: bytes) -> None:
        self._counts[prefix_key] += 1
        if self._counts[prefix_key] == 1:
            _note(prefix_key, self._changes.evicted, self._changes.stored)

    def remove(self, prefix_key: bytes) -> None:
        self._counts[prefix_key] -= 1
        if not self._counts[prefix_key]:
            del self._counts[prefix_key]
            _note(prefix_key, self._changes.stored, self._changes.evicted)

    def take_changes(self) -> Changes:
        """What came and went since the last call."""
        changes, self._changes = self._changes, Changes({}, {})
        return changes

    def check_integrity(self, prefix_keys: Collection[bytes]) -> None:
        """`prefix_keys`: one for each block that is here."""
        assert self._counts == Counter(prefix_keys)
        assert not self._changes.stored.keys() & self._changes.evicted.keys()
        assert self._changes.stored.keys() <= self._counts.keys()
        assert not self._changes.evicted.keys() & self._counts.keys()


def _note(prefix_key: bytes, undone: dict[bytes, None], done: dict[bytes, None]) -> None:
    if prefix_key in undone:
        del undone[prefix_key]
    else:
        done[prefix_key] = None

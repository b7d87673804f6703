"""A set of keys that others follow: a snapshot, then every change, exactly.

Changes are numbered, the same for every follower. One that falls too far behind gets a
new snapshot instead, so that a slow one costs no memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

# Changes that a follower may fall behind.
MAX_BACKLOG = 256


class KeysSnapshot(NamedTuple):
    """`sequence` is that of the last change before it."""

    sequence: int
    incarnation: str
    keys: tuple[bytes, ...]


class KeysChange(NamedTuple):
    sequence: int
    incarnation: str
    # False: these keys have gone.
    added: bool
    keys: tuple[bytes, ...]


KeysEvent: TypeAlias = KeysSnapshot | KeysChange


class KeyFeed:
    """`keys` is the set itself, kept by its owner, who tells each change after making it."""

    def __init__(self, keys: Collection[bytes], incarnation: str) -> None:
        self.keys = keys
        self.incarnation = incarnation
        self.closed = False
        self._sequence = 0
        self._followers: set[Follower] = set()

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    def publish(self, *, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """What changed since the last call. No key is in both."""
        for is_added, keys in ((False, tuple(removed)), (True, tuple(added))):
            if keys:
                self._sequence += 1
                change = KeysChange(self._sequence, self.incarnation, is_added, keys)
                for follower in self._followers:
                    follower.offer(change)

    def snapshot(self) -> KeysSnapshot:
        return KeysSnapshot(self._sequence, self.incarnation, tuple(self.keys))

    def close(self) -> None:
        """Every follower's events end."""
        self.closed = True
        for follower in self._followers:
            follower.wake()

    @contextmanager
    def follow(self) -> Iterator[Follower]:
        follower = Follower(self)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)


class Follower:
    """Its first event is a snapshot."""

    def __init__(self, feed: KeyFeed) -> None:
        self._feed = feed
        self._backlog: deque[KeysChange] = deque()
        self._wants_snapshot = True
        self._awake = asyncio.Event()

    def offer(self, change: KeysChange) -> None:
        if len(self._backlog) >= MAX_BACKLOG:
            self._wants_snapshot = True
            self._backlog.clear()
        if not self._wants_snapshot:
            self._backlog.append(change)
        self.wake()

    def wake(self) -> None:
        self._awake.set()

    async def next(self) -> KeysEvent | None:
        """The next event; None when the feed has closed."""
        while not self._feed.closed:
            self._awake.clear()
            if self._wants_snapshot:
                self._wants_snapshot = False
                return self._feed.snapshot()
            if self._backlog:
                return self._backlog.popleft()
            await self._awake.wait()
        return None

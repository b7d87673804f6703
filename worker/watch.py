"""What watchers of a worker are told: a snapshot, then every change, exactly.

Pure but for the wake-up of waiting watchers. Stored and evicted blocks are
numbered, the same for every watcher. Load is not: a watcher sees the latest when
it has nothing else to read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from worker.messages import CoreLoad, StepReport

EMPTY_LOAD = CoreLoad._make([*[0] * (len(CoreLoad._fields) - 2), {}, {}])
# Events a watcher may fall behind before it gets a snapshot instead.
MAX_BACKLOG = 256
# Load is told this often at most: an engine step may take a few milliseconds.
LOAD_INTERVAL_S = 0.1


class SnapshotEvent(NamedTuple):
    sequence: int
    incarnation: str
    prefix_keys: tuple[bytes, ...]
    load: CoreLoad


class BlocksEvent(NamedTuple):
    sequence: int
    incarnation: str
    stored: bool
    prefix_keys: tuple[bytes, ...]


class LoadEvent(NamedTuple):
    """`sequence` is that of the last event before it."""

    sequence: int
    incarnation: str
    load: CoreLoad


Event: TypeAlias = SnapshotEvent | BlocksEvent | LoadEvent


class WatchHub:
    """The cached prefix keys of one worker, and those who watch them."""

    def __init__(self) -> None:
        self.load = EMPTY_LOAD
        self._incarnation = ""
        self._sequence = 0
        self._keys: dict[bytes, None] = {}
        self._watchers: set[Watcher] = set()
        # Told which blocks were evicted, by their prefix keys.
        self.on_evicted: Callable[[Sequence[bytes]], None] | None = None
        self.closed = False

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def restart(self, incarnation: str, *, num_blocks: int) -> None:
        """A new core, with an empty cache: every watcher starts over."""
        self._incarnation = incarnation
        self._sequence += 1
        if self._keys and self.on_evicted is not None:
            self.on_evicted(list(self._keys))
        self._keys = {}
        self.load = EMPTY_LOAD._replace(num_blocks_total=num_blocks)
        for watcher in self._watchers:
            watcher.start_over()

    def apply(self, report: StepReport) -> None:
        self.load = report.load
        for key in report.evicted:
            self._keys.pop(key, None)
        if report.evicted and self.on_evicted is not None:
            self.on_evicted(report.evicted)
        new_keys = [block.prefix_key for block in report.stored]
        self._keys.update(dict.fromkeys(new_keys))
        # Evictions first: a key in both lists would otherwise end up gone.
        for stored, keys in ((False, report.evicted), (True, new_keys)):
            if keys:
                self._sequence += 1
                event = BlocksEvent(self._sequence, self._incarnation, stored, tuple(keys))
                for watcher in self._watchers:
                    watcher.offer(event)
        for watcher in self._watchers:
            watcher.load_changed()

    def match(self, prefix_keys: Sequence[bytes]) -> int:
        """How many of these blocks are cached, from the first without a gap."""
        keys = itertools.takewhile(self._keys.__contains__, prefix_keys)
        return sum(1 for _ in keys)

    def close(self) -> None:
        """Every watcher's stream ends."""
        self.closed = True
        for watcher in self._watchers:
            watcher.wake()

    def snapshot(self) -> SnapshotEvent:
        return SnapshotEvent(self._sequence, self._incarnation, tuple(self._keys), self.load)

    def load_event(self) -> LoadEvent:
        return LoadEvent(self._sequence, self._incarnation, self.load)

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        watcher = Watcher(self)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)


class Watcher:
    """One consumer. Its first event is a snapshot."""

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub
        self._backlog: deque[BlocksEvent] = deque()
        self._wants_snapshot = True
        self._told_load = EMPTY_LOAD
        self._load_told_s = 0.0
        self._awake = asyncio.Event()
        # Until load may be told again.
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, event: BlocksEvent) -> None:
        if len(self._backlog) >= MAX_BACKLOG:
            self.start_over()
        if not self._wants_snapshot:
            self._backlog.append(event)
            self.wake()

    def start_over(self) -> None:
        self._wants_snapshot = True
        self._backlog.clear()
        self.wake()

    def load_changed(self) -> None:
        """Nothing to do for one that is to hear of it at its time: steps may be short."""
        if self._timer is None:
            self.wake()

    def wake(self) -> None:
        self._awake.set()

    async def next(self) -> Event | None:
        """The next event; None when the hub has closed."""
        while not self._hub.closed:
            self._awake.clear()
            event = self._pop()
            if event is not None:
                return event
            await self._awake.wait()
        return None

    def _pop(self) -> Event | None:
        if self._wants_snapshot:
            self._wants_snapshot = False
            snapshot = self._hub.snapshot()
            self._told_load = snapshot.load
            return snapshot
        if self._backlog:
            return self._backlog.popleft()
        if self._hub.load is not self._told_load:
            return self._pop_load()
        return None

    def _pop_load(self) -> LoadEvent | None:
        loop = asyncio.get_running_loop()
        wait_s = self._load_told_s + LOAD_INTERVAL_S - loop.time()
        if wait_s > 0:
            if self._timer is None:
                self._timer = loop.call_later(wait_s, self._on_time)
            return None
        self._load_told_s = loop.time()
        self._told_load = self._hub.load
        return self._hub.load_event()

    def _on_time(self) -> None:
        self._timer = None
        self.wake()

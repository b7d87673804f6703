"""Reports on their way from a holder of KV blocks to the routers, with what can befall them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from router.reports import Event, EvictedEvent, LoadEvent, Report, SnapshotEvent, StoredEvent

# A real worker tells a watcher of its load this often at most.
LOAD_INTERVAL_S = 0.1
# Keepalive: until a router notices that nothing arrives.
NOTICE_S = 10.0
# Until a router opens a broken feed again.
REOPEN_S = 0.05


class Listener(Protocol):
    """As router.dispatch.Dispatcher hears."""

    def hear(self, holder_id: str, report: Report) -> bool:
        """False: something is missing, and only a snapshot helps."""
        ...

    def deaf(self, holder_id: str) -> None:
        """The feed has ended."""
        ...


class Trouble(NamedTuple):
    """What befalls reports. Probabilities are of each message."""

    delay_s: float = 0.0
    # Up to so much later, each by itself: messages overtake each other.
    jitter_s: float = 0.0
    lost: float = 0.0
    duplicated: float = 0.0
    # Nothing arrives, and nobody notices.
    cut: bool = False


NO_TROUBLE = Trouble()


class Hub:
    """What one holder has in one life, and those who listen.

    `load` says what it is doing, when asked.
    """

    def __init__(
        self, holder_id: str, incarnation: str, load: Callable[[], LoadEvent] | None = None
    ) -> None:
        self.holder_id = holder_id
        self.incarnation = incarnation
        self.sequence = 0
        self._load = load
        self._load_report: Report | None = None
        # In the order in which they came.
        self._keys: dict[bytes, None] = {}
        self._lines: list[Line] = []
        self.is_closed = False

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def connect(self, line: Line) -> None:
        self._lines.append(line)

    def disconnect(self, line: Line) -> None:
        self._lines.remove(line)

    def close(self) -> None:
        """Its holder has died: every feed breaks."""
        self.is_closed = True
        for line in self._lines:
            line.lose()

    def snapshot(self) -> Report:
        load = self._load() if self._load else None
        return self._report(SnapshotEvent(tuple(self._keys), load))

    def publish(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """What has changed, evictions first: a key in both is there in the end."""
        self._load_report = None
        gone, new = tuple(evicted), tuple(stored)
        for key in gone:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(new))
        for event in (EvictedEvent(gone), StoredEvent(new)):
            if event.prefix_keys:
                self.sequence += 1
                report = self._report(event)
                for line in self._lines:
                    line.offer(report)

    def load_changed(self) -> None:
        self._load_report = None
        for line in self._lines:
            line.offer_load()

    def load_report(self) -> Report | None:
        if self._load_report is None and self._load is not None:
            self._load_report = self._report(self._load())
        return self._load_report

    def _report(self, event: Event) -> Report:
        return Report(self.sequence, self.incarnation, event)


class Line:
    """From one holder to one router. Open until closed; after a gap it begins anew."""

    def __init__(
        self,
        hub: Hub,
        listener: Listener,
        *,
        delay_s: float,
        chance: random.Random,
    ) -> None:
        self.hub = hub
        self._listener = listener
        self._delay_s = delay_s
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._trouble = NO_TROUBLE
        self.num_opened = 0
        # Messages of an earlier opening count for nothing.
        self._opening = 0
        self._is_open = False
        self._on_the_way: deque[tuple[float, Report]] = deque()
        self._load_timer: asyncio.TimerHandle | None = None
        self._load_told_s = 0.0
        hub.connect(self)
        self.open()

    def open(self) -> None:
        """Ask for a snapshot, and all that follows it."""
        self.end()
        self._loop.call_later(self._delay_s, self._begin, self._opening)

    def end(self) -> None:
        """Nothing more comes, and the router sees it."""
        self._opening += 1
        self._is_open = False
        self._on_the_way.clear()
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None

    def set_trouble(self, trouble: Trouble) -> None:
        if trouble.cut and not self._trouble.cut:
            self._loop.call_later(NOTICE_S, self._notice, self._opening)
        self._trouble = trouble

    def lose(self) -> None:
        """It breaks. The router sees that, unless nothing gets through to it."""
        self.end()
        after_s = NOTICE_S if self._trouble.cut else self._delay_s
        self._loop.call_later(after_s, self._deafen, self._opening)

    def close(self) -> None:
        self.end()
        self.hub.disconnect(self)

    def offer(self, report: Report) -> None:
        trouble = self._trouble
        if not self._is_open:
            return
        if trouble is NO_TROUBLE:
            self._send(report, self._delay_s)
            return
        if trouble.cut or self._chance.random() < trouble.lost:
            return
        for _ in range(1 + (self._chance.random() < trouble.duplicated)):
            delay_s = self._delay_s + trouble.delay_s
            if trouble.jitter_s:
                delay_s += self._chance.random() * trouble.jitter_s
                self._loop.call_later(delay_s, self._arrive, self._opening, report)
            else:
                self._send(report, delay_s)

    def offer_load(self) -> None:
        """The latest, when it is time for it again."""
        if self._is_open and self._load_timer is None:
            due_s = self._load_told_s + LOAD_INTERVAL_S
            if due_s <= self._loop.time():
                self._tell_load()
            else:
                self._load_timer = self._loop.call_at(due_s, self._tell_load)

    def _begin(self, opening: int) -> None:
        if opening != self._opening or self.hub.is_closed:
            return
        if self._trouble.cut:
            self._loop.call_later(REOPEN_S, self._begin, opening)
            return
        self.num_opened += 1
        self._is_open = True
        self._load_told_s = self._loop.time()
        self._send(self.hub.snapshot(), self._delay_s)

    def _notice(self, opening: int) -> None:
        if opening == self._opening and self._trouble.cut:
            self._deafen(opening)
            self._reopen()

    def _deafen(self, opening: int) -> None:
        if opening == self._opening:
            self._listener.deaf(self.hub.holder_id)

    def _reopen(self) -> None:
        self.end()
        self._loop.call_later(REOPEN_S, self._begin, self._opening)

    def _tell_load(self) -> None:
        self._load_timer = None
        self._load_told_s = self._loop.time()
        report = self.hub.load_report()
        if report is not None:
            self.offer(report)

    def _send(self, report: Report, delay_s: float) -> None:
        """In order, whatever the delay: a later message never goes before an earlier one."""
        due_s = self._loop.time() + delay_s
        if self._on_the_way:
            due_s = max(due_s, self._on_the_way[-1][0])
        self._on_the_way.append((due_s, report))
        if len(self._on_the_way) == 1:
            self._loop.call_at(due_s, self._deliver, self._opening)

    def _deliver(self, opening: int) -> None:
        while opening == self._opening and self._on_the_way:
            due_s, report = self._on_the_way[0]
            if due_s > self._loop.time():
                self._loop.call_at(due_s, self._deliver, opening)
                return
            self._on_the_way.popleft()
            self._arrive(opening, report)

    def _arrive(self, opening: int, report: Report) -> None:
        if opening != self._opening or self._trouble.cut:
            return
        if not self._listener.hear(self.hub.holder_id, report):
            self._reopen()

"""The last minutes of a mesh, bounded by time and by count. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from services.observer.model import BubbleSum, Hop, Reading, Request
from services.observer.requests import assemble

# Of each metric, values that are so far apart are kept; the newest is always there.
READING_INTERVAL_S = 10.0
MAX_SERIES = 5_000
MAX_READINGS_PER_SERIES = 360
MAX_BUBBLES = 20_000
# Of one trace, so many requests can still be completed by hops that come late.
MAX_REQUESTS_OF_TRACE = 16


class Joined(NamedTuple):
    new: list[Request]
    # Known before, and more complete now.
    completed: list[Request]


class _Kept(NamedTuple):
    heard_s: float
    request: Request


class RecentRequests:
    """Those of the last `window_s`, the newest `max_requests` of them."""

    def __init__(self, *, window_s: float, max_requests: int) -> None:
        self.window_s = window_s
        self.max_requests = max_requests
        # By trace, and its outermost span: spans of two traces may have one id.
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        # By trace.
        self._roots: dict[str, list[tuple[str, str]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Request]:
        return (kept.request for kept in self._kept.values())

    def of_trace(self, trace_id: str) -> list[Request]:
        return [self._kept[root].request for root in self._roots.get(trace_id, ())]

    def join(self, trace_id: str, hops: Sequence[Hop], now_s: float) -> Joined:
        """Hops of one trace, of which others may have come before."""
        before = self.of_trace(trace_id)[-MAX_REQUESTS_OF_TRACE:]
        joined = Joined([], [])
        fresh = {hop.span_id for hop in hops}
        known = {hop.span_id for request in before for hop in request.hops}
        together = [*(hop for request in before for hop in request.hops), *hops]
        for request in assemble(together):
            spans = {hop.span_id for hop in request.hops}
            if spans & fresh:
                (joined.completed if spans & known else joined.new).append(request)
                self._replace(request, spans, now_s)
        self.expire(now_s)
        return joined

    def expire(self, now_s: float) -> None:
        while self._kept:
            root, kept = next(iter(self._kept.items()))
            if len(self._kept) <= self.max_requests and now_s - kept.heard_s <= self.window_s:
                return
            self._remove(root)

    def _replace(self, request: Request, spans: set[str], now_s: float) -> None:
        """In place of itself, and of what has turned out to be a part of it."""
        root = request.trace_id, request.hops[0].span_id
        for part in self._roots.get(request.trace_id, [])[:]:
            if part != root and part[1] in spans:
                self._remove(part)
        if root in self._kept:
            self._kept[root] = self._kept[root]._replace(request=request)
            return
        self._kept[root] = _Kept(now_s, request)
        self._roots.setdefault(request.trace_id, []).append(root)

    def _remove(self, root: tuple[str, str]) -> None:
        request = self._kept.pop(root).request
        roots = self._roots[request.trace_id]
        roots.remove(root)
        if not roots:
            del self._roots[request.trace_id]

    def check_integrity(self) -> None:
        assert len(self._kept) <= self.max_requests
        assert sorted(root for roots in self._roots.values() for root in roots) == sorted(
            self._kept
        )
        for root, kept in self._kept.items():
            assert (kept.request.trace_id, kept.request.hops[0].span_id) == root
            assert root in self._roots[kept.request.trace_id]


class RecentReadings:
    """Of each metric of each process: how it went, and its newest value."""

    def __init__(self, *, window_s: float) -> None:
        self.window_s = window_s
        self._series: dict[tuple[object, ...], deque[Reading]] = {}
        self.num_refused = 0

    def __iter__(self) -> Iterator[Reading]:
        return (reading for series in self._series.values() for reading in series)

    def add(self, reading: Reading) -> None:
        key = (reading.member_id, reading.name, reading.labels)
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                self.num_refused += 1
                return
            series = self._series[key] = deque(maxlen=MAX_READINGS_PER_SERIES)
        # The last two are too close to each other: the newest takes the place of the other.
        if len(series) > 1 and series[-1].unix_s - series[-2].unix_s < READING_INTERVAL_S:
            series.pop()
        series.append(reading)

    def expire(self, now_unix_s: float) -> None:
        for key in list(self._series):
            series = self._series[key]
            while series and now_unix_s - series[0].unix_s > self.window_s:
                series.popleft()
            if not series:
                del self._series[key]


class RecentBubbles:
    """Bubbles of the last `window_s`."""

    def __init__(self, *, window_s: float) -> None:
        self.window_s = window_s
        self._bubbles: deque[BubbleSum] = deque(maxlen=MAX_BUBBLES)

    def __iter__(self) -> Iterator[BubbleSum]:
        return iter(self._bubbles)

    def add(self, bubble: BubbleSum) -> None:
        self._bubbles.append(bubble)

    def expire(self, now_unix_s: float) -> None:
        while self._bubbles and now_unix_s - self._bubbles[0].unix_s > self.window_s:
            self._bubbles.popleft()

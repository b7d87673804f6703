"""Follows those who hold KV blocks: each worker's Watch, and each KV store's.

What they tell goes to the dispatcher as reports. A stream that breaks, or has a gap, is
opened again, and begins with a snapshot. Requests never wait for any of this: what a
holder has not told yet, the dispatcher predicts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import grpc

from firsttoken.kvstore.v1 import kvstore_pb2
from firsttoken.worker.v1 import worker_pb2
from router.peers import PeerLost, answer_of
from router.reports import Report, Tier
from router.subscription import BACKOFF_S, Subscription
from router.watch_messages import SLICE_KEYS, Reading
from services.core.keys import KEY_BYTES
from services.runtime.channels import Channels
from services.runtime.tasks import end_tasks

WatchCall: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any]"

METHODS = {
    Tier.WORKER: "/firsttoken.worker.v1.WorkerService/Watch",
    Tier.NODE: "/firsttoken.kvstore.v1.KvStoreService/Watch",
}
# Streams that are opened at the same time. Each counts for so long at most: who does not
# answer holds up nobody else.
MAX_OPENING = 64
OPENING_TURN_S = 0.1
MAX_RETRIES_PER_S = 500
OPEN_TIMEOUT_S = 10.0
LONG_BYTES = SLICE_KEYS * KEY_BYTES


class Ears(Protocol):
    """Who is told."""

    def hear(self, holder_id: str, report: Report) -> bool:
        """False: something is missing before it; a new snapshot is needed."""
        ...

    def deaf(self, holder_id: str) -> None:
        """Nothing more comes from it for now."""
        ...


class Holder(NamedTuple):
    """Who holds KV blocks; `tier` says whether a worker or a KV store."""

    id: str
    address: str
    tier: Tier


class Openings:
    """Keeps thousands of streams from being opened at once."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_OPENING)
        self.num_counted = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for it. It may be over before the block is."""
        await self._room.acquire()
        self.num_counted += 1
        counts = True

        def stop_counting() -> None:
            nonlocal counts
            if counts:
                counts = False
                self.num_counted -= 1
                self._room.release()

        timer = asyncio.get_running_loop().call_later(OPENING_TURN_S, stop_counting)
        try:
            yield
        finally:
            timer.cancel()
            stop_counting()


class Watching:
    """An async context manager that has one stream open to each holder."""

    def __init__(self, ears: Ears, channels: Channels) -> None:
        # Streams that ended, or could not be opened, since the start.
        self.num_broken = 0
        self._ears = ears
        self._channels = channels
        self._feeds: dict[Holder, _Feed] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._to_start: deque[_Feed] = deque()
        self._starting: asyncio.Task[None] | None = None
        self.openings = Openings()
        # Long messages are taken in one at a time, in slices: together they would hold the loop.
        self._long = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """May be called twice."""
        self.follow(())
        starting = [self._starting] if self._starting is not None else []
        await end_tasks([*self._ending, *starting])

    def follow(self, holders: Iterable[Holder]) -> None:
        """These, and no others from now on. Call it before their channels are dropped."""
        wanted = dict.fromkeys(holders)
        for holder in self._feeds.keys() - wanted.keys():
            self._feeds.pop(holder).stop(self._ending)
            self._ears.deaf(holder.id)
        for holder in wanted:
            if holder not in self._feeds:
                self._feeds[holder] = feed = _Feed(self, holder)
                self._to_start.append(feed)
        if self._to_start and (self._starting is None or self._starting.done()):
            self._starting = asyncio.create_task(self._start(), name="watch: start")

    @property
    def longest_backoff_s(self) -> float:
        """Longer where so many are gone that asking for them would be all there is to do."""
        return max(BACKOFF_S[1], len(self._feeds) / MAX_RETRIES_PER_S)

    @property
    def num_followed(self) -> int:
        return len(self._feeds)

    @property
    def num_live(self) -> int:
        """Holders whose snapshot has come, and whose stream is open."""
        return sum(feed.live for feed in self._feeds.values())

    def open(self, holder: Holder) -> WatchCall:
        channel = self._channels.get(holder.address)
        if holder.tier is Tier.WORKER:
            return channel.unary_stream(
                METHODS[holder.tier],
                request_serializer=worker_pb2.WatchRequest.SerializeToString,
                response_deserializer=worker_pb2.WatchResponse.FromString,
            )(worker_pb2.WatchRequest())
        return channel.unary_stream(
            METHODS[holder.tier],
            request_serializer=kvstore_pb2.WatchRequest.SerializeToString,
            response_deserializer=kvstore_pb2.WatchResponse.FromString,
        )(kvstore_pb2.WatchRequest())

    async def take(self, holder: Holder, message: Any, reports: Iterator[Report]) -> bool:
        """Whether nothing was missing."""
        if message.ByteSize() <= LONG_BYTES:
            return all(self._ears.hear(holder.id, report) for report in reports)
        async with self._long:
            for report in reports:
                if not self._ears.hear(holder.id, report):
                    return False
                await asyncio.sleep(0)
        return True

    async def _start(self) -> None:
        """One by one: thousands at once would hold the loop."""
        while self._to_start:
            self._to_start.popleft().start()
            await asyncio.sleep(0)

    def lost(self, holder: Holder) -> None:
        self.num_broken += 1
        self._ears.deaf(holder.id)


class _Feed(Subscription):
    """The stream of one holder."""

    def __init__(self, watching: Watching, holder: Holder) -> None:
        super().__init__(holder.id, "watch")
        self.live = False
        self._watching = watching
        self._holder = holder

    @property
    def _longest_backoff_s(self) -> float:
        return self._watching.longest_backoff_s

    def _lost(self) -> None:
        self._watching.lost(self._holder)

    async def _listen(self) -> None:
        reading = Reading()
        read = reading.of_worker if self._holder.tier is Tier.WORKER else reading.of_store
        try:
            async with self._watching.openings.turn():
                call = self._call = self._watching.open(self._holder)
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    message: Any = await answer_of(call.read())
            while message is not grpc.aio.EOF:
                if not await self._watching.take(self._holder, message, read(message)):
                    return
                self.live = True
                message = await answer_of(call.read())
        finally:
            self.live = False
        raise PeerLost("it has ended the stream")

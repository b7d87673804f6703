"""Several channels to one peer, as many as its streams need, the one used longest ago first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import grpc

from services.core.settings import MeshSettings

# How long there is one channel more than the streams need before it closes.
SURPLUS_FOR_S = 60.0


class PoolSize(NamedTuple):
    """To each peer; one channel takes any number of streams."""

    max_channels: int = 1
    streams_per_channel: int = 64

    @classmethod
    def of(cls, settings: MeshSettings) -> PoolSize:
        return cls(settings.max_channels_per_peer, settings.streams_per_channel)


ONE_CHANNEL = PoolSize()


class CountedChannel:
    """Gives what its channel gives, and counts the calls that are open on it."""

    def __init__(self, channel: grpc.aio.Channel, on_end: Callable[[CountedChannel], None]) -> None:
        self.channel = channel
        self.num_streams = 0
        self._on_end = on_end
        # What stubs ask a channel for.
        self.unary_unary = partial(self._method, channel.unary_unary)
        self.unary_stream = partial(self._method, channel.unary_stream)
        self.stream_unary = partial(self._method, channel.stream_unary)
        self.stream_stream = partial(self._method, channel.stream_stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def _method(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return partial(self._begin, make(*arguments, **options))

    def _begin(self, begin: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        call = begin(*arguments, **options)
        self.num_streams += 1
        has_ended = False

        def end(_: object) -> None:
            # gRPC tells twice of a call whose request could not be sent.
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self.num_streams -= 1
                self._on_end(self)

        call.add_done_callback(end)
        return call


class ChannelPool:
    """`close_channel`: called with each that is no longer needed.

    A channel that nobody uses goes stale: what lies between may forget its connection
    without a word, and the next call on it hangs. Taken in turn, all stay in use; what is
    more than the streams need is closed.
    """

    def __init__(
        self,
        size: PoolSize,
        open_channel: Callable[[], grpc.aio.Channel],
        close_channel: Callable[[grpc.aio.Channel], None],
        *,
        surplus_for_s: float = SURPLUS_FOR_S,
    ) -> None:
        self._size = size
        self._open_channel = open_channel
        self._close_channel = close_channel
        self._surplus_for_s = surplus_for_s
        # The one used longest ago first.
        self._channels: list[CountedChannel] = []
        # They close when their last call has ended.
        self._leaving: set[CountedChannel] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_streams(self) -> int:
        return sum(each.num_streams for each in (*self._channels, *self._leaving))

    @property
    def num_channels(self) -> int:
        return len(self._channels) + len(self._leaving)

    def take(self) -> grpc.aio.Channel:
        """For one call, which is to begin before the next `take`."""
        channel = self._choose()
        self._channels.remove(channel)
        self._channels.append(channel)
        self._watch_surplus()
        return cast(grpc.aio.Channel, channel)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        channels, self._channels = [*self._channels, *self._leaving], []
        self._leaving.clear()
        for each in channels:
            await each.channel.close()

    def _choose(self) -> CountedChannel:
        for channel in self._channels:
            if channel.num_streams < self._size.streams_per_channel:
                return channel
        if len(self._channels) < self._size.max_channels:
            opened = CountedChannel(self._open_channel(), self._on_end)
            self._channels.append(opened)
            return opened
        return min(self._channels, key=lambda each: each.num_streams)

    def _on_end(self, channel: CountedChannel) -> None:
        if channel in self._leaving:
            self._close_if_free(channel)
        self._watch_surplus()

    def _close_if_free(self, channel: CountedChannel) -> None:
        if not channel.num_streams:
            self._leaving.remove(channel)
            self._close_channel(channel.channel)

    def _watch_surplus(self) -> None:
        """The timer runs while there is one channel more than needed, the next call counted."""
        room = (len(self._channels) - 1) * self._size.streams_per_channel
        has_surplus = sum(each.num_streams for each in self._channels) < room
        if has_surplus and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._surplus_for_s, self._shrink)
        elif not has_surplus and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _shrink(self) -> None:
        self._timer = None
        channel = min(self._channels, key=lambda each: each.num_streams)
        self._channels.remove(channel)
        self._leaving.add(channel)
        self._close_if_free(channel)
        self._watch_surplus()

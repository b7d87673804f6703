"""A client's channels to the workers that fetched answers come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc

OpenChannel: TypeAlias = Callable[[str, str | None], grpc.aio.Channel]

# Workers come and go; beyond so many, those asked for longest ago are closed.
MAX_CHANNELS = 256
# Longer than answers take.
RETIREMENT_S = 900.0


class WorkerChannels:
    """One per worker. `open_channel` takes an address and the name in its certificate.

    `generation`: of what channels are opened with. When it changes they are opened anew, and
    calls go on in those that they are in.
    """

    def __init__(
        self,
        open_channel: OpenChannel,
        *,
        encrypted: bool,
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        self._open_channel = open_channel
        self._encrypted = encrypted
        self._find_generation = generation
        self._generation = generation()
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def get(self, address: str, server_name: str) -> grpc.aio.Channel | None:
        """None where the worker would not be encrypted and the router is, or the reverse."""
        if self._encrypted != bool(server_name):
            return None
        if (generation := self._find_generation()) != self._generation:
            self._generation = generation
            self._renew()
        key = address, server_name
        channel = self._channels.pop(key, None)
        if channel is None:
            channel = self._open_channel(address, server_name or None)
            if len(self._channels) >= MAX_CHANNELS:
                self._retire(self._channels.pop(next(iter(self._channels))))
        self._channels[key] = channel
        return channel

    async def close(self) -> None:
        """May be called twice."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
        for task in self._retiring:
            task.cancel()
        if self._retiring:
            await asyncio.wait(self._retiring)

    def _renew(self) -> None:
        while self._channels:
            self._retire(self._channels.popitem()[1])

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Close it when its calls have ended."""
        task = asyncio.ensure_future(channel.close(RETIREMENT_S))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

"""Channels to other processes, one per peer."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TypeAlias

import grpc

MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

Options: TypeAlias = list[tuple[str, int]]


def message_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel that reconnects within a second and never retries by itself."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            *message_options(),
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.enable_http_proxy", 0),  # peers are on the mesh's own network
            # A shared subchannel would keep its backoff when a channel is opened anew.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),  # also the time a connect may take
            ("grpc.max_reconnect_backoff_ms", 1000),
        ],
    )


class Channels:
    """An async context manager that owns one channel per address.

    End calls before their channel is dropped or closed: grpc.aio finds only some of
    them, leaves the others to their peer, and a read begun afterwards may hang.
    """

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Channels:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def get(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return channel

    def drop(self, address: str) -> None:
        """Close the channel to a peer that is gone."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for address in list(self._channels):
            self.drop(address)
        while self._closing:
            await asyncio.wait(self._closing)

"""Channels to other processes: one per peer, or a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import TypeAlias

import grpc

from firsttoken.control.v1 import control_pb2
from services.runtime.channel_pool import ONE_CHANNEL, ChannelPool, PoolSize
from services.runtime.local_sockets import is_local, is_reachable
from services.runtime.tls import MESH_NAME, Tls

MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
# Longer than requests may take by default (router.max_deadline_s): calls end by themselves.
RETIRED_FOR_S = 900.0
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE

Options: TypeAlias = list[tuple[str, int | str]]
# What is kept of one.
Peer: TypeAlias = grpc.aio.Channel | ChannelPool


def message_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def peer_options() -> Options:
    """Between services of the mesh: a peer that stands still is given up."""
    return [
        # gRPC 1.76 lets a keepalive's ping wait for this long, a minute by default, and not for
        # grpc.keepalive_timeout_ms.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # What lies between forgets connections that rest: the next call would hang for as long
        # as it takes to notice.
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel that reconnects within a second and never retries by itself.

    With `tls` the peer must be a service of the mesh, wherever it is, and is shown our
    certificate. The channel keeps the files of this moment, also when it reconnects.
    """
    options: Options = [
        *message_options(),
        *peer_options(),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.enable_http_proxy", 0),  # peers are on the mesh's own network
        # A shared subchannel would keep its backoff when a channel is opened anew.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),  # also the time a connect may take
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", MESH_NAME))
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


class Channels:
    """An async context manager that owns one channel per address, or up to `size.max_channels`.

    End calls before their channel is dropped or closed: grpc.aio finds only some of
    them, leaves the others to their peer, and a read begun afterwards may hang.

    When other TLS files are in use, `get` opens anew; the channels before are closed
    after `retired_for_s`, when their calls have ended.
    """

    def __init__(
        self,
        tls: Tls | None = None,
        *,
        size: PoolSize = ONE_CHANNEL,
        retired_for_s: float = RETIRED_FOR_S,
    ) -> None:
        self._tls = tls
        self._size = size
        self._retired_for_s = retired_for_s
        self._generation = 0
        self._peers: dict[str, Peer] = {}
        # Of those on this host, by address; and which of them a channel was opened to.
        self._local_addresses: dict[str, str] = {}
        self._opened_to: dict[str, str] = {}
        self._retired: dict[Peer, asyncio.TimerHandle] = {}
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
        """To be asked for again for each call."""
        if self._tls is not None and (generation := self._tls.generation) != self._generation:
            self._generation = generation
            for each in list(self._peers):
                self._retire(each)
        channel = self._take(address)
        if address in self._opened_to and self._is_lost(address, channel):
            self._retire(address)
            channel = self._take(address)
        return channel

    def learn(self, members: Iterable[control_pb2.Member]) -> None:
        """Which peers are on this host, and have a socket there: it is used from now on."""
        if self._tls is not None:
            return
        self._local_addresses = {
            member.address: member.local_address if is_local(member.local_address) else ""
            for member in members
        }
        for address, target in list(self._opened_to.items()):
            if self._local_addresses.get(address, target) != target:
                self._retire(address)

    def drop(self, address: str) -> None:
        """Close what is open to a peer that is gone."""
        self._opened_to.pop(address, None)
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._close(peer)

    async def close(self) -> None:
        for address in list(self._peers):
            self.drop(address)
        for peer, timer in self._retired.items():
            timer.cancel()
            self._close(peer)
        self._retired.clear()
        while self._closing:
            await asyncio.wait(self._closing)

    def _take(self, address: str) -> grpc.aio.Channel:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = self._open(address)
        return peer.take() if isinstance(peer, ChannelPool) else peer

    def _is_lost(self, address: str, channel: grpc.aio.Channel) -> bool:
        """Unlike at a port, nobody will listen at that socket again. Control may tell late."""
        state = channel.get_state()
        return state is _FAILED and not is_reachable(self._opened_to[address])

    def _open(self, address: str) -> Peer:
        target = self._local_addresses.get(address, "")
        if target and is_reachable(target):
            self._opened_to[address] = target
        else:
            target = address
        if self._size.max_channels == 1:
            return open_channel(target, self._tls)  # nothing around it: a call costs what it costs
        return ChannelPool(self._size, lambda: open_channel(target, self._tls), self._close)

    def _retire(self, address: str) -> None:
        self._opened_to.pop(address, None)
        peer = self._peers.pop(address)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._retired_for_s, self._end_retirement, peer)
        self._retired[peer] = timer

    def _end_retirement(self, peer: Peer) -> None:
        del self._retired[peer]
        self._close(peer)

    def _close(self, peer: Peer) -> None:
        task = asyncio.ensure_future(peer.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from firsttoken.control.v1 import control_pb2
from services.core.settings import MeshSettings
from services.runtime.channel_pool import PoolSize
from services.runtime.channels import Channels
from services.runtime.local_sockets import (
    host_id,
    is_local,
    is_reachable,
    local_address_for,
)
from services.runtime.server import MeshServer
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


@asynccontextmanager
async def serving(listen: str = "127.0.0.1:0", *, local: bool = True) -> AsyncIterator[MeshServer]:
    """Answers how it was called: ipv4 or unix."""

    async def tell(request: bytes, context: Any) -> bytes:
        return str(context.peer()).partition(":")[0].encode()

    address = local_address_for(MeshSettings(unix_sockets=local))
    server = MeshServer(listen, service_names=[], local_address=address)
    handler: Any = grpc.unary_unary_rpc_method_handler(tell)
    server.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("local", {"Tell": handler}),)
    )
    async with server:
        yield server


def member_of(server: MeshServer) -> control_pb2.Member:
    return control_pb2.Member(address=server.address, local_address=server.local_address)


async def how(channels: Channels, address: str) -> str:
    tell: Any = channels.get(address).unary_unary("/local/Tell")
    return str((await tell(b"")).decode())


def test_a_name_is_of_this_host_and_nobody_s_else() -> None:
    one, other = (local_address_for(MeshSettings()) for _ in range(2))

    assert one != other
    assert is_local(one)
    assert not is_reachable(one)
    assert not is_local("")
    assert not is_local(one.replace(host_id(), "0123456789abcdef"))
    assert not is_local(f"{one}0")
    assert not is_local("unix:/tmp/socket")
    assert local_address_for(MeshSettings(unix_sockets=False)) == ""


@pytest.mark.parametrize("size", [PoolSize(), PoolSize(2, 1)])
async def test_a_peer_on_this_host_is_called_over_its_socket(size: PoolSize) -> None:
    async with serving() as server, Channels(size=size) as channels:
        assert await how(channels, server.address) == "ipv4"  # nobody has said so yet
        channels.drop(server.address)
        channels.learn([member_of(server)])

        assert await how(channels, server.address) == "unix"


async def test_what_is_of_another_host_or_out_of_reach_is_called_over_its_port() -> None:
    async with serving() as server, Channels() as channels:
        elsewhere = server.local_address.replace(host_id(), "0123456789abcdef")
        for local_address in (elsewhere, local_address_for(MeshSettings()), ""):
            member = control_pb2.Member(address=server.address, local_address=local_address)
            channels.learn([member])

            assert await how(channels, server.address) == "ipv4"
            channels.drop(server.address)


async def test_a_successor_at_the_same_port_is_met_at_its_own_socket() -> None:
    async with Channels() as channels:
        address = "127.0.0.1:0"
        for local, expected in ((True, "unix"), (True, "unix"), (False, "ipv4")):
            async with serving(address, local=local) as server:
                address = server.address
                channels.learn([member_of(server)])

                assert await how(channels, address) == expected


async def test_while_control_is_silent_a_successor_is_met_at_its_port() -> None:
    async with Channels() as channels:
        async with serving() as server:
            address = server.address
            channels.learn([member_of(server)])
            assert await how(channels, address) == "unix"
        async with serving(address):

            async def is_met() -> bool:
                try:
                    return await how(channels, address) == "ipv4"
                except grpc.aio.AioRpcError:
                    return False

            await eventually(is_met)

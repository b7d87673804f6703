from __future__ import annotations

import asyncio
import signal
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.bench.forgetful_proxy import forgetful_proxy
from services.runtime import channels as module
from services.runtime import server as server_module
from services.runtime.channels import Channels
from services.runtime.server import MeshServer
from tests.runtime.processes import running
from tests.runtime.waiting import eventually

CHECK = health_pb2.HealthCheckRequest()


async def test_a_peer_has_one_channel() -> None:
    async with Channels() as channels:
        one = channels.get("127.0.0.1:1")

        assert channels.get("127.0.0.1:1") is one
        assert channels.get("127.0.0.1:2") is not one


async def test_a_dropped_channel_is_closed_and_made_anew() -> None:
    async with MeshServer("127.0.0.1:0", service_names=[]) as server, Channels() as channels:
        old = channels.get(server.address)
        await health_pb2_grpc.HealthStub(old).Check(CHECK)
        channels.drop(server.address)
        channels.drop(server.address)
        new = channels.get(server.address)
        answer = await health_pb2_grpc.HealthStub(new).Check(CHECK)

    assert new is not old
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_closing_twice_is_harmless() -> None:
    async with Channels() as channels:
        channels.get("127.0.0.1:1")
        channels.drop("127.0.0.1:1")
        channels.get("127.0.0.1:2")
        await channels.close()
        await channels.close()


async def test_a_peer_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEPALIVE_TIME_MS", 1000)
    monkeypatch.setattr(module, "KEEPALIVE_TIMEOUT_MS", 1000)
    async with running("services.control") as peer, Channels() as channels:
        watch = health_pb2_grpc.HealthStub(channels.get(peer.address)).Watch(CHECK)
        await watch.read()
        peer.send(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async with asyncio.timeout(30):
                await watch.read()

    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("for_callers", [False, True])
async def test_a_channel_that_rests_notices_that_it_was_forgotten(
    monkeypatch: pytest.MonkeyPatch, for_callers: bool
) -> None:
    for each in (module, server_module):
        monkeypatch.setattr(each, "KEEPALIVE_TIME_MS", 100)
    monkeypatch.setattr(module, "KEEPALIVE_TIMEOUT_MS", 500)
    serving = MeshServer("127.0.0.1:0", service_names=[], for_callers=for_callers)
    async with serving as server, Channels() as channels, forgetful_proxy(server.address) as proxy:
        channel = channels.get(proxy.address)
        await health_pb2_grpc.HealthStub(channel).Check(CHECK)
        # Pings, and no call; and the server takes no offence.
        seen_s: set[float] = set()
        await eventually(lambda: seen_s.add(proxy.used_s) or len(seen_s) > 8)  # type: ignore[func-returns-value]
        assert channel.get_state() is grpc.ChannelConnectivity.READY

        proxy.forget(unused_since_s=time.monotonic())
        await eventually(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
        await health_pb2_grpc.HealthStub(channel).Check(CHECK)

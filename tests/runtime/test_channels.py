from __future__ import annotations

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.channels import Channels
from services.runtime.server import MeshServer

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

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.runtime.channels import open_channel
from services.runtime.server import MeshServer
from services.runtime.startup import StartupError
from tests.runtime.ports import free_port
from tests.runtime.wires import dial

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


METHOD = "/test.One/Method"
Handle = Callable[[bytes, object], Awaitable[bytes]]


def make_server(handle: Handle, limit: int = 1 << 20) -> MeshServer:
    """Its only method, METHOD, does what `handle` says."""
    server = MeshServer("127.0.0.1:0", service_names=["test.One"], max_message_bytes=limit)
    handlers: dict[str, Any] = {"Method": grpc.unary_unary_rpc_method_handler(handle)}
    server.server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.One", handlers)]
    )
    return server


async def test_it_says_where_it_listens() -> None:
    async with MeshServer("127.0.0.1:0", service_names=[]) as server:
        host, _, port = server.address.rpartition(":")

        assert host == "127.0.0.1"
        assert int(port) > 0


async def test_a_port_in_use_is_one_readable_line(capfd: pytest.CaptureFixture[str]) -> None:
    async with MeshServer("127.0.0.1:0", service_names=[]) as first:
        second = MeshServer(first.address, service_names=[])
        with pytest.raises(StartupError) as caught:
            await second.__aenter__()

    assert str(caught.value) == (
        f"cannot listen on {first.address}: the port is in use; choose another"
    )
    assert capfd.readouterr().err == ""


async def test_a_port_is_free_again_as_soon_as_the_server_has_stopped() -> None:
    async with MeshServer("127.0.0.1:0", service_names=[]) as first:
        address = first.address
        async with open_channel(address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    async with MeshServer(address, service_names=[]) as second:
        assert second.address == address


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        ("127.0.0.1", "must be host:port"),
        ("127.0.0.1:http", "must be host:port"),
        ("127.0.0.1:99999", "the port must be at most 65535"),
        ("192.0.2.1:7000", "Cannot assign requested address"),
        ("no.such.host.invalid:7000", ""),
    ],
)
async def test_an_address_that_cannot_be_bound_says_why(
    listen: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on .*{listen}.*{reason}"):
        await MeshServer(listen, service_names=[]).__aenter__()

    assert capfd.readouterr().err == ""


async def test_health_follows_set_serving() -> None:
    server = MeshServer("127.0.0.1:0", service_names=["a.B"])
    async with server, open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def ask(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            return int((await stub.Check(request)).status)

        before = [await ask(""), await ask("a.B")]
        await server.set_serving(True)
        serving = [await ask(""), await ask("a.B")]
        await server.set_serving(False)
        after = [await ask(""), await ask("a.B")]

    assert before == [NOT_SERVING, NOT_SERVING]
    assert serving == [SERVING, SERVING]
    assert after == [NOT_SERVING, NOT_SERVING]


async def test_reflection_lists_the_services() -> None:
    server = MeshServer("127.0.0.1:0", service_names=["a.B"])
    async with server, open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await stub.ServerReflectionInfo(iter([request])).read()

    names = [service.name for service in answer.list_services_response.service]
    assert "a.B" in names
    assert "grpc.health.v1.Health" in names


async def test_two_mib_pass_and_more_than_the_limit_does_not() -> None:
    async def size(request: bytes, context: object) -> bytes:
        return str(len(request)).encode()

    server = make_server(size, limit=4 << 20)
    async with server, dial(server.address) as channel:
        measure = channel.unary_unary(METHOD)
        answer = await measure(bytes(2 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await measure(bytes(5 << 20))

    assert answer == b"2097152"
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_stopping_lets_a_call_end_within_the_grace() -> None:
    held, release = asyncio.Event(), asyncio.Event()

    async def hold(request: bytes, context: object) -> bytes:
        held.set()
        await release.wait()
        return b"done"

    server = make_server(hold)
    async with server, dial(server.address) as channel:
        call = channel.unary_unary(METHOD)(b"")
        await held.wait()
        stopping = asyncio.ensure_future(server.stop(grace_s=60))
        await asyncio.sleep(0)
        release.set()
        answer = await call
        await stopping

    assert answer == b"done"


async def test_stopping_cancels_what_outlives_the_grace() -> None:
    held, ended = asyncio.Event(), asyncio.Event()

    async def hold(request: bytes, context: object) -> bytes:
        held.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    server = make_server(hold)
    async with server, dial(server.address) as channel:
        call = channel.unary_unary(METHOD)(b"")
        await held.wait()
        await server.stop(grace_s=0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        await ended.wait()


async def test_stopping_twice_is_harmless() -> None:
    async with MeshServer("127.0.0.1:0", service_names=[]) as server:
        await server.stop()
        await server.stop()


async def test_a_stop_that_hangs_in_grpc_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(grace: float | None) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("services.runtime.server.STOP_MARGIN_S", 0.01)
    async with MeshServer("127.0.0.1:0", service_names=[]) as server:
        stop = server.server.stop
        monkeypatch.setattr(server.server, "stop", hang)
        await server.stop(grace_s=0.01)
        await stop(None)

    assert "did not stop" in caplog.text


async def test_a_channel_reconnects_within_seconds_of_the_peer_s_return() -> None:
    address = f"127.0.0.1:{free_port()}"
    request = health_pb2.HealthCheckRequest()
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(request)
        async with MeshServer(address, service_names=[]):
            answer = await stub.Check(request, wait_for_ready=True, timeout=30)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert answer.status == NOT_SERVING

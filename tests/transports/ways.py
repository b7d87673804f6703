"""The ways from one service to another, and a service at their end that may do anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from firsttoken.control.v1 import control_pb2
from services.cli.local_ca import LocalCa
from services.core.settings import MeshSettings
from services.runtime.channel_pool import PoolSize
from services.runtime.channels import Channels
from services.runtime.interceptor import Context
from services.runtime.local_sockets import local_address_for
from services.runtime.server import MeshServer
from services.runtime.tls import Tls
from tests.runtime.certificates import write
from tests.runtime.waiting import eventually
from tests.transports.relays import Relay, relay_to

SERVICE = "test.transports.Service"
POOL = PoolSize(max_channels=3, streams_per_channel=2)


class Kind(NamedTuple):
    name: str
    is_local: bool = False
    has_tls: bool = False
    size: PoolSize = PoolSize()


KINDS = (
    Kind("tcp"),
    Kind("tls", has_tls=True),
    Kind("unix", is_local=True),
    Kind("tcp, pooled", size=POOL),
    Kind("tls, pooled", has_tls=True, size=POOL),
    Kind("unix, pooled", is_local=True, size=POOL),
)


def payload(number: int, num_bytes: int) -> bytes:
    """Of message `number`."""
    piece = number.to_bytes(4, "big")
    return (piece * (num_bytes // 4 + 1))[:num_bytes]


class Service:
    """Of bytes. Counts the calls that are in it, and how they ended."""

    def __init__(self) -> None:
        self.num_running = self.num_ended = self.num_cancelled = self.num_sent = 0
        self.has_come = asyncio.Event()

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Tell": grpc.unary_unary_rpc_method_handler(self.tell),
                "Hold": grpc.unary_unary_rpc_method_handler(self.hold),
                "Many": grpc.unary_stream_rpc_method_handler(self.many),
                "Count": grpc.stream_unary_rpc_method_handler(self.count),
                "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
            },
        )

    async def tell(self, request: bytes, context: Context) -> bytes:
        """What of the call is not its message; gives the metadata back as it ends."""
        with self._counted():
            remaining_s = context.time_remaining()
            pairs = [
                (key, value if isinstance(value, str) else value.hex())
                for key, value in context.invocation_metadata() or ()
            ]
            context.set_trailing_metadata((("told-bin", request[:256]),))
            return json.dumps({"remaining_s": remaining_s, "metadata": pairs}).encode()

    async def hold(self, request: bytes, context: Context) -> bytes:
        with self._counted():
            await asyncio.Event().wait()
            raise AssertionError("it was never let go")

    async def many(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """As many messages as `request` says, so long, so long apart; then what it says."""
        with self._counted():
            asked = json.loads(request)
            for number in range(asked["count"]):
                if number:
                    await asyncio.sleep(asked.get("pause_s", 0.0))
                self.num_sent += 1
                yield payload(number, asked["num_bytes"])
            if asked.get("linger_s"):
                await asyncio.sleep(asked["linger_s"])

    async def count(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        with self._counted():
            return str(sum([len(request) async for request in requests])).encode()

    async def echo(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        with self._counted():
            async for request in requests:
                yield request

    def _counted(self) -> Any:
        return _Counted(self)


class _Counted:
    def __init__(self, service: Service) -> None:
        self._service = service

    def __enter__(self) -> None:
        self._service.num_running += 1
        self._service.has_come.set()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._service.num_running -= 1
        if kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
            self._service.num_cancelled += 1
        else:
            self._service.num_ended += 1


class Way(NamedTuple):
    service: Service
    server: MeshServer
    channels: Channels
    relay: Relay
    # What callers name the peer by.
    address: str

    def method(self, name: str, shape: str) -> Callable[..., Any]:
        """`shape`: unary_unary, …; raw bytes both ways."""
        made = getattr(self.channels.get(self.address), shape)
        method: Callable[..., Any] = made(f"/{SERVICE}/{name}")
        return method

    def tell(self, request: bytes = b"", **options: Any) -> Any:
        return self.method("Tell", "unary_unary")(request, **options)

    def hold(self, **options: Any) -> Any:
        return self.method("Hold", "unary_unary")(b"", **options)

    def many(
        self, count: int, num_bytes: int, *, timeout: float | None = None, **asked: Any
    ) -> Any:
        request = json.dumps({"count": count, "num_bytes": num_bytes, **asked}).encode()
        return self.method("Many", "unary_stream")(request, timeout=timeout)

    def count(self, requests: Any, **options: Any) -> Any:
        return self.method("Count", "stream_unary")(requests, **options)

    def echo(self, **options: Any) -> Any:
        return self.method("Echo", "stream_stream")(**options)

    async def idle(self) -> None:
        await eventually(lambda: not self.service.num_running, "the calls to end")


@asynccontextmanager
async def open_way(kind: Kind, folder: Path, *, relayed: bool = False) -> AsyncIterator[Way]:
    """From channels as services have them to a server as they have it."""
    tls = _tls(folder) if kind.has_tls else None
    service = Service()
    local = local_address_for(MeshSettings(unix_sockets=True)) if kind.is_local else ""
    server = MeshServer("127.0.0.1:0", service_names=[SERVICE], tls=tls, local_address=local)
    server.server.add_generic_rpc_handlers((service.handlers(),))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        target = server.local_address or server.address
        relay = Relay(target)
        if relayed:
            relay = await stack.enter_async_context(relay_to(target))
            target = relay.address
        channels = await stack.enter_async_context(Channels(tls, size=kind.size))
        address = server.address
        if kind.is_local:
            channels.learn([control_pb2.Member(address=address, local_address=target)])
        else:
            address = target
        way = Way(service, server, channels, relay, address)
        yield way
        await way.idle()


def _tls(folder: Path) -> Tls:
    ca = LocalCa.new()
    return Tls(write(folder / "tls", ca.pem.certificate, ca.service()))

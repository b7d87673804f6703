"""A service of bytes on the mesh's own server, and the mesh's own channels to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import grpc

from firsttoken.control.v1 import control_pb2
from services.core.errors import InvalidArgument, Violation
from services.core.settings import MeshSettings
from services.runtime.channel_pool import ONE_CHANNEL, ChannelPool, PoolSize
from services.runtime.channels import MAX_MESSAGE_BYTES, Channels
from services.runtime.local_sockets import local_address_for
from services.runtime.server import MeshServer
from services.runtime.telemetry import TraceContext
from services.runtime.tls import Tls
from tests.transports.cutting_proxy import CuttingProxy, cutting_proxy

SERVICE = "test.Any"
ONE_ONE, ONE_MANY, MANY_ONE, MANY_MANY = SHAPES = ("OneOne", "OneMany", "ManyOne", "ManyMany")
PLAN_KEY = "plan-bin"
_PERIOD = 1 << 20
_NOISE = random.Random(0).randbytes(_PERIOD) * 2


class Transport(NamedTuple):
    wire: str  # tcp, tls or unix
    size: PoolSize

    @property
    def name(self) -> str:
        return f"{self.wire}-{'one' if self.size == ONE_CHANNEL else 'pooled'}"


POOLED = PoolSize(max_channels=3, streams_per_channel=4)
TRANSPORTS = tuple(
    Transport(wire, size) for wire in ("tcp", "tls", "unix") for size in (ONE_CHANNEL, POOLED)
)


class Plan(NamedTuple):
    """What the service is to do in one call: replies of these sizes.

    `hold_at`: the reply before which it waits for ever; the number of replies: after the
    last and before the status. A shape with one reply takes the first.
    """

    id: int = 0
    sizes: tuple[int, ...] = (10,)
    hold_at: int | None = None
    fails: bool = False

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((PLAN_KEY, json.dumps(self).encode()),)

    @classmethod
    def of(cls, context: Any) -> Plan:
        key, sizes, hold_at, fails = json.loads(dict(context.invocation_metadata())[PLAN_KEY])
        return cls(key, tuple(sizes), hold_at, fails)

    def payload(self, index: int) -> bytes:
        return noise(self.id * 7919 + index * 104_729, self.sizes[index])

    def replies(self, shape: str, requests: Sequence[bytes]) -> list[bytes]:
        """What the client must get."""
        if shape == ONE_MANY:
            return [self.payload(index) for index in range(len(self.sizes))]
        if shape == MANY_MANY:
            return [digest([each]) + self.payload(index) for index, each in enumerate(requests)]
        return [digest(requests) + self.payload(0)]


def noise(place: int, num_bytes: int) -> bytes:
    place %= _PERIOD
    part = _NOISE[place : place + min(num_bytes, _PERIOD)]
    return (part * -(-num_bytes // _PERIOD))[:num_bytes]


def digest(messages: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for each in messages:
        found.update(len(each).to_bytes(8, "big") + each)
    return found.digest()


class Service:
    """Counts what it serves, by the plans' ids."""

    def __init__(self) -> None:
        self.num_open = 0
        self.begun: Counter[int] = Counter()
        # done, cancelled or failed
        self.ended: dict[int, str] = {}
        self.holding: set[int] = set()
        self.remaining_s: dict[int, float] = {}
        self.metadata: dict[int, list[tuple[str, str | bytes]]] = {}
        self.trace: dict[int, TraceContext] = {}
        self.peer = ""
        # What the transport has taken.
        self.num_sent_bytes: Counter[int] = Counter()

    def handler(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, Any] = {
            ONE_ONE: grpc.unary_unary_rpc_method_handler(self._one_one),
            ONE_MANY: grpc.unary_stream_rpc_method_handler(self._one_many),
            MANY_ONE: grpc.stream_unary_rpc_method_handler(self._many_one),
            MANY_MANY: grpc.stream_stream_rpc_method_handler(self._many_many),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _one_one(self, request: bytes, context: Any) -> bytes:
        with self._serving(context) as plan:
            await self._reach(plan, 0)
            return digest([request]) + plan.payload(0)

    async def _one_many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        with self._serving(context) as plan:
            for index, size in enumerate(plan.sizes):
                await self._reach(plan, index)
                yield plan.payload(index)
                self.num_sent_bytes[plan.id] += size
            await self._reach(plan, len(plan.sizes))

    async def _many_one(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        with self._serving(context) as plan:
            taken = [request async for request in requests]
            await self._reach(plan, 0)
            return digest(taken) + plan.payload(0)

    async def _many_many(
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        with self._serving(context) as plan:
            index = 0
            async for request in requests:
                await self._reach(plan, index)
                yield digest([request]) + plan.payload(index)
                index += 1
            await self._reach(plan, index)

    @contextmanager
    def _serving(self, context: Any) -> Iterator[Plan]:
        plan = Plan.of(context)
        self.begun[plan.id] += 1
        self.num_open += 1
        self.peer = context.peer()
        self.metadata[plan.id] = list(context.invocation_metadata())
        self.trace[plan.id] = TraceContext.from_metadata(context.invocation_metadata())
        remaining_s = context.time_remaining()
        if remaining_s is not None:
            self.remaining_s[plan.id] = remaining_s
        context.set_trailing_metadata((("told", "text"), ("told-bin", bytes(range(256)))))
        how = "failed"
        try:
            if plan.fails:
                raise InvalidArgument([Violation("sizes", "must be other ones")])
            yield plan
            how = "done"
        except (asyncio.CancelledError, GeneratorExit):
            how = "cancelled"
            raise
        finally:
            self.num_open -= 1
            self.ended[plan.id] = how

    async def _reach(self, plan: Plan, index: int) -> None:
        if plan.hold_at == index:
            self.holding.add(plan.id)
            await asyncio.Event().wait()


class Ground(NamedTuple):
    """`target`: where calls go to, by way of `proxy` where there is one."""

    transport: Transport
    server: MeshServer
    service: Service
    channels: Channels
    target: str
    proxy: CuttingProxy | None

    def begin(self, shape: str, plan: Plan, requests: Any = b"", **options: Any) -> Any:
        """`requests`: one, or an iterable of them for shapes that take many."""
        channel: Any = self.channels.get(self.target)
        kinds = {
            ONE_ONE: channel.unary_unary,
            ONE_MANY: channel.unary_stream,
            MANY_ONE: channel.stream_unary,
            MANY_MANY: channel.stream_stream,
        }
        metadata = (*plan.metadata(), *options.pop("metadata", ()))
        return kinds[shape](f"/{SERVICE}/{shape}")(requests, metadata=metadata, **options)

    async def answers(self) -> bool:
        """Whether a plain call gets through now, with the right bytes."""
        plan = Plan(id=-1)
        reply = await self.begin(ONE_ONE, plan, b"well?", wait_for_ready=True, timeout=30)
        return bool(reply == plan.replies(ONE_ONE, [b"well?"])[0])

    @property
    def num_streams(self) -> int:
        """As the pools count them."""
        pools = self.channels._peers.values()
        return sum(each.num_streams for each in pools if isinstance(each, ChannelPool))

    def is_at_rest(self) -> bool:
        return self.service.num_open == 0 and self.num_streams == 0


async def take(shape: str, call: Any) -> list[bytes]:
    """All replies; raises the status."""
    if shape in (ONE_ONE, MANY_ONE):
        return [await call]
    # An iterator may not be used where `read` has been.
    replies = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
    return replies


@asynccontextmanager
async def prepare(
    transport: Transport,
    tls: Tls | None,
    *,
    proxied: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncIterator[Ground]:
    """`tls`: for the transport that has it."""
    is_unix = transport.wire == "unix"
    tls = tls if transport.wire == "tls" else None
    service = Service()
    server = MeshServer(
        "127.0.0.1:0",
        service_names=[SERVICE],
        max_message_bytes=max_message_bytes,
        tls=tls,
        local_address=local_address_for(MeshSettings()) if is_unix else "",
    )
    server.server.add_generic_rpc_handlers((service.handler(),))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server)
        stack.push_async_callback(server.stop, 0)
        target = server.local_address if is_unix else server.address
        proxy = None
        if proxied:
            proxy = await stack.enter_async_context(cutting_proxy(target))
            target = proxy.address
        channels = await stack.enter_async_context(Channels(tls, size=transport.size))
        if is_unix:
            member = control_pb2.Member(address=server.address, local_address=target)
            channels.learn([member])
            target = server.address
        yield Ground(transport, server, service, channels, target, proxy)

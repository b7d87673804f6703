"""What a connection that is slow, or that the server has closed, does to each way to Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Link
from services.bench.redis_ways import POOL_SIZE, get, latency_of, open_link, put, timed
from services.runtime.tasks import end_tasks

SLOW_S = 0.02
IDLE_TIMEOUT_S = 1
NUM_GETS = 100
KEY, VALUE = b"bench", bytes(64 << 10)


async def measure_slow_one(way: str, address: RedisAddress) -> dict[str, Any]:
    """GETs one by one when each reply over one connection, the first, comes SLOW_S late.

    All connections of a pool have been used before, and the slow one was last to be done.
    """
    async with _late_first_connection(address) as late, open_link(way, late) as link:
        await put(link, KEY, VALUE)
        for _ in range(2):  # the first time, it may take longer to connect than to be slow
            await asyncio.gather(*(get(link, KEY) for _ in range(POOL_SIZE)))
        latencies_s = [await timed(lambda: get(link, KEY)) for _ in range(NUM_GETS)]
    slow = sum(latency_s > SLOW_S for latency_s in latencies_s)
    return {"way": way, **latency_of(latencies_s)._asdict(), "slow_share": slow / NUM_GETS}


async def measure_idle(way: str, address: RedisAddress) -> dict[str, Any]:
    """A server that closes what is idle, GETs one by one for longer than that, then many."""
    async with open_link(way, address) as link:
        await link.call([(b"CONFIG", b"SET", b"timeout", b"%d" % IDLE_TIMEOUT_S)])
        await put(link, KEY, VALUE)
        await asyncio.gather(*(get(link, KEY) for _ in range(POOL_SIZE)))
        end_s = time.perf_counter() + 4 * IDLE_TIMEOUT_S
        while time.perf_counter() < end_s:
            await get(link, KEY)
            await asyncio.sleep(0.01)
        before = await _num_connections(link)
        latencies_s = await asyncio.gather(
            *(timed(lambda: get(link, KEY)) for _ in range(POOL_SIZE))
        )
        num_new = await _num_connections(link) - before
        await link.call([(b"CONFIG", b"SET", b"timeout", b"0")])
    return {
        "way": way,
        "p50_ms": latency_of(latencies_s).p50_ms,
        "max_ms": max(latencies_s) * 1e3,
        "new_connections": num_new,
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
    try:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 20):
                if delay_s and data[:1] == b"$":  # a reply begins
                    await asyncio.sleep(delay_s)
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()

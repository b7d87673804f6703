"""What a rest does to connections, taken last in first out or first in first out.

A proxy between forgets connections that rest, and tells nobody; or the peer was killed and
started again meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc

from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Link, RedisUnavailable
from services.bench.forgetful_proxy import ForgetfulProxy, forgetful_proxy
from services.bench.pool_peer import run_peer
from services.bench.pools import echo
from services.bench.redis_ways import POOL_SIZE, WAYS, embedded_server, get, open_link, put
from services.runtime.channel_pool import ChannelPool, CountedChannel, PoolSize
from services.runtime.channels import open_channel

# Longer than grpc.keepalive_time_ms and its timeout: what those do is seen.
CALL_TIMEOUT_S = 20.0
REDIS_TIMEOUT_S = 2.0
# What still goes over a connection after a call is over by then.
QUIET_S = 0.1
NUM_CHANNELS = 4
CHANNEL_WAYS = ("one", "lifo", "fifo")
# Before many calls at once: all rest; or there are as many calls one by one; or the peer was
# killed and started again.
CASES = ("all rest", "some rest", "killed")
KEY = b"bench"
Row: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[], Awaitable[object]]


class LastFirst(ChannelPool):
    """The channel used last comes first: what most pools do."""

    def _choose(self) -> CountedChannel:
        self._channels.reverse()
        try:
            return super()._choose()
        finally:
            self._channels.reverse()


async def measure() -> dict[str, list[Row]]:
    return {"channels": await measure_channels(), "redis": await measure_redis()}


async def measure_channels(
    *,
    timeout_s: float = CALL_TIMEOUT_S,
    ways: Sequence[str] = CHANNEL_WAYS,
    cases: Sequence[str] = CASES,
) -> list[Row]:
    rows = []
    async with run_peer() as peer:
        for case in cases:
            for way in ways:
                async with (
                    forgetful_proxy(peer.address) as proxy,
                    _dialling(way, proxy.address) as dial,
                ):
                    call = partial(echo, dial, timeout_s)
                    found = await _measure(call, proxy, case, 2 * NUM_CHANNELS)
                rows.append({"case": case, "way": way, **found})
    return rows


async def measure_redis(
    *,
    timeout_s: float = REDIS_TIMEOUT_S,
    ways: Sequence[str] = WAYS,
    cases: Sequence[str] = CASES,
) -> list[Row]:
    rows = []
    with embedded_server() as address:
        target = f"{address.host}:{address.port}"
        for case in cases:
            for way in ways:
                async with AsyncExitStack() as stack:
                    proxy = await stack.enter_async_context(forgetful_proxy(target))
                    host, _, port = proxy.address.rpartition(":")
                    there = RedisAddress(host=host, port=int(port))
                    link: Link = await stack.enter_async_context(
                        open_link(way, there, timeout_s=timeout_s)
                    )
                    await put(link, KEY, b"value")
                    call = partial(get, link, KEY)
                    found = await _measure(call, proxy, case, POOL_SIZE)
                    rows.append({"case": case, "way": way, **found})
    return rows


@asynccontextmanager
async def _dialling(way: str, address: str) -> AsyncIterator[Callable[[], grpc.aio.Channel]]:
    opened = partial(open_channel, address)
    if way == "one":
        async with opened() as channel:
            yield lambda: channel
        return
    pool_class = LastFirst if way == "lifo" else ChannelPool
    # The proxy's end closes what a pool of this size gave up; none is, so quickly.
    pool = pool_class(PoolSize(NUM_CHANNELS, 2), opened, lambda channel: None)
    try:
        yield pool.take
    finally:
        await pool.close()


async def _measure(call: Call, proxy: ForgetfulProxy, case: str, number: int) -> Row:
    """Of `number` calls at once, after all connections were in use and then the case."""
    for _ in range(3):
        await asyncio.gather(*(call() for _ in range(number)))
    await asyncio.sleep(QUIET_S)
    resting_s = time.monotonic()
    if case == "some rest":
        for _ in range(number):
            await call()
    if case == "killed":
        proxy.close_connections()
        await asyncio.sleep(QUIET_S)
    else:
        proxy.forget(unused_since_s=resting_s)
    answers = await asyncio.gather(*(_try(call) for _ in range(number)))
    latencies_s = sorted(latency_s for latency_s, _ in answers)
    return {
        "calls": number,
        "failed": sum(not answered for _, answered in answers),
        "p50_ms": latencies_s[number // 2] * 1e3,
        "longest_ms": latencies_s[-1] * 1e3,
    }


async def _try(call: Call) -> tuple[float, bool]:
    """Seconds, and whether it was answered."""
    began_s = time.perf_counter()
    try:
        await call()
    except (grpc.aio.AioRpcError, RedisUnavailable):
        return time.perf_counter() - began_s, False
    return time.perf_counter() - began_s, True

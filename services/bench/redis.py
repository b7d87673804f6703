"""Ways to Redis, compared in one run on a real server: redis-py's pool as it is (last in,
first out), the same first in, first out, and one multiplexed connection.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from hashlib import sha256
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Link
from kvstore.redis_tier import RedisTier
from kvstore.tier2 import Record, Wanted
from services.bench.redis_connections import measure_idle, measure_slow_one
from services.bench.redis_ways import (
    FIFO,
    MULTIPLEXED,
    WAYS,
    embedded_server,
    get,
    latency_of,
    open_link,
    put,
    timed,
)
from services.core.keys import storage_key
from services.core.kvblocks import Block, checksum
from services.core.settings import KvStoreSettings
from services.runtime.tasks import end_tasks

SMALL, BLOCK = b"small", b"block"
SIZES = {SMALL: 4 << 10, BLOCK: 1 << 20}
# What reads whole blocks while small values are asked for.
NUM_BLOCK_READERS = 4
CHAINS = ((64 << 10, 128), (1 << 20, 32))  # bytes of a block, blocks
FINGERPRINT = b"bench"
Row: TypeAlias = dict[str, Any]


class Gets(NamedTuple):
    """`cpu_us`: of this process, a GET."""

    gets_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


class Lookups(NamedTuple):
    p50_ms: float
    p99_ms: float
    block_bytes_per_s: float


class Reads(NamedTuple):
    bytes_per_s: float


async def measure(*, seconds: float = 0.5, num_rounds: int = 3) -> dict[str, Any]:
    """`seconds` for each figure and round. Rounds alternate between the ways; medians."""
    with embedded_server() as address:
        async with open_link(MULTIPLEXED, address) as link:
            for key, num_bytes in SIZES.items():
                await put(link, key, os.urandom(num_bytes))
        compare = partial(_compare, address=address, seconds=seconds, num_rounds=num_rounds)
        return {
            "benchmark": "redis",
            "default": KvStoreSettings().redis_connections,
            "get": [
                {"bytes": SIZES[key], "in_flight": count, **row}
                for key, count in product(SIZES, (1, 16))
                for row in await compare(partial(_measure_gets, key=key, num_in_flight=count))
            ],
            "small_get_beside_blocks": await compare(_measure_beside_blocks),
            "chain": [
                {"block_bytes": size, "blocks": count, **row}
                for size, count in CHAINS
                for row in await compare(
                    partial(_measure_reads, num_bytes=size, num_blocks=count),
                    ways=(FIFO, MULTIPLEXED),
                )
            ],
            "one_slow_connection": [await measure_slow_one(way, address) for way in WAYS],
            "after_idle": [await measure_idle(way, address) for way in WAYS],
        }


async def _compare(
    measure_one: Callable[..., Awaitable[Any]],
    *,
    address: RedisAddress,
    seconds: float,
    num_rounds: int,
    ways: Iterable[str] = WAYS,
) -> list[Row]:
    rounds: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(num_rounds):
        for way, results in rounds.items():
            results.append(await measure_one(way, address, seconds))
    return [{"way": way, **_medians(results)} for way, results in rounds.items()]


def _medians(results: list[Any]) -> dict[str, float]:
    """Of named tuples, by field."""
    columns = zip(*results, strict=True)
    return dict(zip(results[0]._fields, map(statistics.median, columns), strict=True))


async def _measure_gets(
    way: str, address: RedisAddress, seconds: float, *, key: bytes, num_in_flight: int
) -> Gets:
    async with open_link(way, address) as link:
        await asyncio.gather(*(get(link, key) for _ in range(num_in_flight)))
        began_s, cpu_s = time.perf_counter(), time.process_time()
        getting = (_get_until(began_s + seconds, link, key) for _ in range(num_in_flight))
        latencies_s = [each for many in await asyncio.gather(*getting) for each in many]
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    count = len(latencies_s)
    return Gets(count / took_s, *latency_of(latencies_s), cpu_s / count * 1e6)


async def _get_until(end_s: float, link: Link, key: bytes) -> list[float]:
    """Seconds that each took."""
    latencies_s = [await timed(lambda: get(link, key))]
    while time.perf_counter() < end_s:
        latencies_s.append(await timed(lambda: get(link, key)))
    return latencies_s


async def _measure_beside_blocks(way: str, address: RedisAddress, seconds: float) -> Lookups:
    """A look-up on the connections on which blocks come: does it wait behind them?"""
    num_blocks = 0

    async def keep_reading(link: Link) -> None:
        nonlocal num_blocks
        while True:
            await get(link, BLOCK)
            num_blocks += 1

    async with open_link(way, address) as link:
        await asyncio.gather(*(get(link, BLOCK) for _ in range(NUM_BLOCK_READERS + 1)))
        readers = [asyncio.create_task(keep_reading(link)) for _ in range(NUM_BLOCK_READERS)]
        began_s = time.perf_counter()
        try:
            latencies_s = await _get_until(began_s + seconds, link, SMALL)
        finally:
            took_s = time.perf_counter() - began_s
            await end_tasks(readers)
    return Lookups(*latency_of(latencies_s), num_blocks * SIZES[BLOCK] / took_s)


async def _measure_reads(
    way: str, address: RedisAddress, seconds: float, *, num_bytes: int, num_blocks: int
) -> Reads:
    chain, records, payload = _make_chain(num_bytes, num_blocks)
    settings = KvStoreSettings(redis_url=str(address), redis_connections=way)
    wanted = Wanted(FINGERPRINT, num_bytes)
    num_read = 0
    async with RedisTier(settings) as tier:
        for record in records:
            tier.put_nowait(chain, record, payload)
        await tier.flush()
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + seconds:
            async with aclosing(tier.get_many(chain, range(num_blocks), wanted)) as blocks:
                async for found in blocks:
                    assert not found.reason, found.reason
                    num_read += 1
        took_s = time.perf_counter() - began_s
    return Reads(num_read * num_bytes / took_s)


def _make_chain(num_bytes: int, num_blocks: int) -> tuple[list[bytes], list[Record], bytes]:
    payload = os.urandom(num_bytes)
    prefix_keys = [sha256(b"%d %d" % (num_bytes, index)).digest() for index in range(num_blocks)]
    chain = [storage_key(prefix_key, FINGERPRINT) for prefix_key in prefix_keys]
    records = [
        Record(Block(key, prefix_key, FINGERPRINT, index, 64, num_bytes), "", checksum(payload))
        for index, (key, prefix_key) in enumerate(zip(chain, prefix_keys, strict=True))
    ]
    return chain, records, payload

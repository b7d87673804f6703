"""Several connections to a peer against one: under load, beside streams that stand still, and
after a rest. The peers are processes of their own.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import grpc

from services.bench.pool_peer import BULK, ECHO, SWALLOW, Peer, run_peer
from services.bench.processes import cpu_s, stopped
from services.bench.redis_ways import Latency, latency_of
from services.runtime.channel_pool import PoolSize
from services.runtime.channels import Channels
from services.runtime.tasks import end_tasks

NUM_CHANNELS = (1, 2, 4)
IN_FLIGHT = (64, 256)
REQUEST = b"." * 100
UPLOAD = bytes(64 << 10)
# What goes on beside, and how many streams that is: half of them fill a channel.
BESIDE = {"nothing": 0, "uploads": 16, "unread downloads": 16, "downloads": 2, "stopped": 0}
SETTLE_S = 1.0
Row: TypeAlias = dict[str, Any]
Dial: TypeAlias = Callable[[], grpc.aio.Channel]


class _Places(NamedTuple):
    channels: Channels
    slow: Peer
    other: Peer


class Load(NamedTuple):
    calls_per_s: float
    p50_ms: float
    p99_ms: float
    client_cpu_us: float
    server_cpu_us: float


async def measure_load(
    *,
    seconds: float,
    num_turns: int,
    num_channels: Sequence[int] = NUM_CHANNELS,
    in_flight: Sequence[int] = IN_FLIGHT,
) -> list[Row]:
    """Calls of 100 bytes, so many at a time, by turns. Medians."""
    rows = []
    async with run_peer() as peer:
        for number in in_flight:
            seen: dict[int, list[Load]] = {count: [] for count in num_channels}
            for _ in range(num_turns):
                for count, loads in seen.items():
                    loads.append(await _load(peer, count, number, seconds))
            for count, loads in seen.items():
                columns = map(statistics.median, zip(*loads, strict=True))
                figures = dict(zip(Load._fields, columns, strict=True))
                rows.append({"channels": count, "in_flight": number, **figures})
    return rows


async def _load(peer: Peer, count: int, number: int, seconds: float) -> Load:
    latencies_s: list[float] = []

    async def keep_asking(dial: Dial, end_s: float) -> None:
        while (began_s := time.perf_counter()) < end_s:
            await echo(dial)
            latencies_s.append(time.perf_counter() - began_s)

    async with Channels(size=PoolSize(count, -(-number // count))) as channels:
        dial = partial(channels.get, peer.address)
        await asyncio.gather(*(echo(dial) for _ in range(number)))
        began_s, client_s, server_s = time.perf_counter(), time.process_time(), cpu_s(peer.pid)
        await asyncio.gather(*(keep_asking(dial, began_s + seconds) for _ in range(number)))
        took_s, client_s = time.perf_counter() - began_s, time.process_time() - client_s
        server_s = cpu_s(peer.pid) - server_s
    total = len(latencies_s)
    per_call_us = [spent_s / total * 1e6 for spent_s in (client_s, server_s)]
    return Load(total / took_s, *latency_of(latencies_s), *per_call_us)


async def measure_slow_peer(
    *,
    seconds: float,
    num_turns: int,
    num_channels: Sequence[int] = (1, 4),
    settle_s: float = SETTLE_S,
) -> list[Row]:
    """Calls one by one, in turn to a peer and to another one, while something goes on
    at the first: uploads that it hardly reads, downloads that we do not read, downloads at
    full speed, or that it stands still, when only the other one is called. By turns; medians.
    """
    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
    async with run_peer() as slow, run_peer() as other:
        for _ in range(num_turns):
            for beside, count in product(BESIDE, num_channels):
                size = PoolSize(count, max(1, BESIDE[beside] // 2))
                async with Channels(size=size) as channels:
                    places = _Places(channels, slow, other)
                    found = await _beside(places, beside, seconds=seconds, settle_s=settle_s)
                seen.setdefault((beside, count), []).append(found)
    return [
        {
            "beside": beside,
            "channels": count,
            **{name: statistics.median(turn[name] for turn in turns) for name in turns[0]},
        }
        for (beside, count), turns in seen.items()
    ]


async def _beside(
    places: _Places, beside: str, *, seconds: float, settle_s: float
) -> dict[str, float]:
    slow = places.slow
    dials: dict[str, Dial] = {
        "same_peer": partial(places.channels.get, slow.address),
        "other_peer": partial(places.channels.get, places.other.address),
    }
    for dial in dials.values():
        await echo(dial)
    if beside == "stopped":
        del dials["same_peer"]
    latencies_s: dict[str, list[float]] = {name: [] for name in dials}
    async with _streams(partial(places.channels.get, slow.address), beside):
        with stopped([slow.pid]) if beside == "stopped" else nullcontext():
            await asyncio.sleep(settle_s)
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                for name, dial in dials.items():
                    began_s = time.perf_counter()
                    await echo(dial)
                    latencies_s[name].append(time.perf_counter() - began_s)
    return {
        f"{name}_{field}": value
        for name, found in latencies_s.items()
        for field, value in zip(Latency._fields, latency_of(found), strict=True)
    }


@asynccontextmanager
async def _streams(dial: Dial, kind: str) -> AsyncIterator[None]:
    calls: list[Any] = []
    tasks: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as stack:
        for _ in range(BESIDE[kind]):
            channel: Any = dial()
            if kind == "uploads":
                calls.append(channel.stream_unary(SWALLOW)())
                tasks.append(asyncio.create_task(_upload(calls[-1])))
                continue
            calls.append(channel.unary_stream(BULK)(b""))
            if kind == "downloads":
                tasks.append(asyncio.create_task(_download(calls[-1])))
        stack.push_async_callback(end_tasks, tasks)
        for call in calls:
            stack.callback(call.cancel)
        yield


async def _upload(call: Any) -> None:
    while True:
        await call.write(UPLOAD)


async def _download(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def echo(dial: Dial, timeout_s: float | None = None) -> None:
    # As the services do it: for each call the channel is asked for anew.
    ask: Any = dial().unary_unary(ECHO)
    await ask(REQUEST, timeout=timeout_s)

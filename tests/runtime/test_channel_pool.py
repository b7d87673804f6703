from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import grpc
import pytest

from services.runtime.channel_pool import ChannelPool, PoolSize
from services.runtime.channels import Channels, open_channel
from tests.runtime.waiting import eventually

SIZE = PoolSize(max_channels=3, streams_per_channel=2)


class Peer(NamedTuple):
    """A server whose answers come when `may_end` is set; `fail` fails, `stream` gives one
    message and then waits."""

    address: str
    may_end: asyncio.Event


@asynccontextmanager
async def serving() -> AsyncIterator[Peer]:
    may_end = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        await may_end.wait()
        return request

    async def fail(request: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await may_end.wait()

    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "wait": grpc.unary_unary_rpc_method_handler(wait),
        "fail": grpc.unary_unary_rpc_method_handler(fail),
        "stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pool", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Peer(f"127.0.0.1:{port}", may_end)
    finally:
        await server.stop(None)


@asynccontextmanager
async def pooling(address: str, *, surplus_for_s: float = 60.0) -> AsyncIterator[ChannelPool]:
    closing: list[asyncio.Task[None]] = []
    pool = ChannelPool(
        SIZE,
        partial(open_channel, address),
        lambda channel: closing.append(asyncio.ensure_future(channel.close())),
        surplus_for_s=surplus_for_s,
    )
    try:
        yield pool
    finally:
        await pool.close()
        await asyncio.gather(*closing)


def begin(pool: ChannelPool, method: str = "wait") -> Any:
    channel: Any = pool.take()
    if method == "stream":
        return channel.stream_stream("/pool/stream")()
    return channel.unary_unary(f"/pool/{method}")(b"x")


def channel_of(channel: Any) -> object:
    return channel.channel


async def test_one_more_channel_opens_when_each_has_its_streams() -> None:
    async with serving() as peer, pooling(peer.address) as pool:
        counts = []
        calls = []
        for _ in range(8):
            calls.append(begin(pool))
            counts.append(pool.num_channels)
        peer.may_end.set()
        await asyncio.gather(*calls)

        assert counts == [1, 1, 2, 2, 3, 3, 3, 3]  # and no more than there may be
        await eventually(lambda: pool.num_streams == 0)


async def test_the_channel_used_longest_ago_comes_first() -> None:
    async with serving() as peer, pooling(peer.address) as pool:
        calls = [begin(pool) for _ in range(6)]
        peer.may_end.set()
        await asyncio.gather(*calls)
        await eventually(lambda: pool.num_streams == 0)
        taken = [channel_of(pool.take()) for _ in range(6)]

        assert len(set(taken[:3])) == 3
        assert taken[3:] == taken[:3]


@pytest.mark.parametrize(
    "end",
    [
        lambda call, peer: call.cancel(),
        lambda call, peer: peer.may_end.set(),
    ],
    ids=["cancelled", "answered"],
)
@pytest.mark.parametrize("method", ["wait", "stream"])
async def test_a_stream_counts_until_it_ends(
    end: Callable[[Any, Peer], object], method: str
) -> None:
    async with serving() as peer, pooling(peer.address) as pool:
        call = begin(pool, method)
        if method == "stream":
            await call.read()
        assert pool.num_streams == 1
        end(call, peer)
        await eventually(lambda: pool.num_streams == 0)


async def test_calls_that_fail_or_find_nobody_do_not_stay_counted() -> None:
    async with serving() as peer, pooling(peer.address) as pool, pooling("127.0.0.1:1") as lost:
        for failing, there in (("fail", pool), ("wait", lost)):
            with pytest.raises(grpc.aio.AioRpcError):
                await begin(there, failing)
            await eventually(lambda there=there: there.num_streams == 0)  # type: ignore[misc]


async def test_a_task_that_is_cancelled_gives_its_stream_back() -> None:
    async with serving() as peer, pooling(peer.address) as pool:

        async def ask() -> None:
            await begin(pool)

        task = asyncio.create_task(ask())
        await eventually(lambda: pool.num_streams == 1)
        task.cancel()
        await asyncio.wait({task})
        await eventually(lambda: pool.num_streams == 0)


async def test_what_is_more_than_the_streams_need_closes() -> None:
    async with serving() as peer, pooling(peer.address, surplus_for_s=0.02) as pool:
        calls = [begin(pool) for _ in range(6)]
        for call in calls[1:]:
            call.cancel()
        await eventually(lambda: pool.num_channels == 1)

        assert pool.num_streams == 1
        peer.may_end.set()
        assert await calls[0] == b"x"  # its channel is not the one that closed


async def test_a_channel_with_streams_closes_only_after_them() -> None:
    async with serving() as peer, pooling(peer.address, surplus_for_s=0.02) as pool:
        calls = [begin(pool) for _ in range(6)]
        # On each channel one is left: more channels than three streams need.
        taken = [calls[0], calls[2], calls[4]]
        for call in set(calls) - set(taken):
            call.cancel()
        await eventually(lambda: len(pool._channels) == 2)

        assert pool.num_channels == 3
        peer.may_end.set()
        assert await asyncio.gather(*taken) == [b"x"] * 3
        await eventually(lambda: pool.num_channels == 1)


async def test_a_pool_is_dropped_and_closed_like_a_channel() -> None:
    async with serving() as peer, Channels(size=SIZE) as channels:
        peer.may_end.set()
        for _ in range(2):
            ask: Any = channels.get(peer.address).unary_unary("/pool/wait")
            assert await ask(b"x") == b"x"
            channels.drop(peer.address)
        channels.get(peer.address)

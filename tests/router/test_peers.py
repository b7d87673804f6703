from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from router.peers import PeerLost, answer_of

Behaviour: TypeAlias = Callable[[bytes, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[bytes]]


@asynccontextmanager
async def run_peer(behaviour: Behaviour) -> AsyncIterator[grpc.aio.Channel]:
    handler: Any = grpc.unary_unary_rpc_method_handler(behaviour)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Peer", {"Ask": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


def ask(channel: grpc.aio.Channel) -> Awaitable[bytes]:
    method: Any = channel.unary_unary("/test.Peer/Ask")
    call: Awaitable[bytes] = method(b"question")
    return call


async def test_gives_the_answer() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return request.upper()

    async with run_peer(answer) as channel:
        assert await answer_of(ask(channel)) == b"QUESTION"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_peer_that_cannot_serve_is_lost(code: grpc.StatusCode) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        await context.abort(code, "not now")
        raise AssertionError

    async with run_peer(refuse) as channel:
        with pytest.raises(PeerLost, match="not now"):
            await answer_of(ask(channel))


async def test_what_the_request_is_to_blame_for_passes() -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad")
        raise AssertionError

    async with run_peer(refuse) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="bad"):
            await answer_of(ask(channel))


async def test_a_channel_closed_under_the_call_loses_the_peer() -> None:
    asked = asyncio.Event()

    async def ponder(request: bytes, context: Any) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        return b""

    async with run_peer(ponder) as channel:
        task = asyncio.create_task(answer_of_call(channel))
        await asked.wait()
        await channel.close()
        with pytest.raises(PeerLost, match="closed"):
            await task


async def test_a_cancelled_task_stays_cancelled() -> None:
    asked = asyncio.Event()

    async def ponder(request: bytes, context: Any) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        return b""

    async with run_peer(ponder) as channel:
        task = asyncio.create_task(answer_of_call(channel))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def answer_of_call(channel: grpc.aio.Channel) -> bytes:
    return await answer_of(ask(channel))

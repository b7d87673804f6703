"""Calls over a pool of connections, the one that rested longest first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from redis.asyncio.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import RedisError, ResponseError

from kvstore import redis_link
from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Command, RedisUnavailable, pack


class _OldestFirst(ConnectionPool):
    """redis-py takes the connection given back last: load stays on few, the others go stale."""

    def get_available_connection(self) -> AbstractConnection:
        if self._available_connections:
            # super() takes from the end.
            self._available_connections.append(self._available_connections.pop(0))
        connection: AbstractConnection = super().get_available_connection()  # type: ignore[no-untyped-call]
        return connection


class FifoPool(BlockingConnectionPool, _OldestFirst):
    """Waits for a connection when all are in use.

    BlockingConnectionPool calls get_available_connection of the class after it, not of
    its subclass: the order of the bases is what makes the override count.
    """


class PoolLink:
    """See Link. `timeout_s`: for a whole call, waiting for a connection included."""

    def __init__(
        self,
        address: RedisAddress,
        *,
        max_connections: int,
        connect_timeout_s: float,
        timeout_s: float,
        pool_class: type[BlockingConnectionPool] = FifoPool,
    ) -> None:
        self._timeout_s = timeout_s
        self._pool = pool_class(
            max_connections=max_connections,
            timeout=timeout_s,
            connection_class=_connection_class(address),
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=timeout_s,
            protocol=2,
            driver_info=None,  # one round trip less to connect
            **address.redis_py_arguments(),
        )

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                try:
                    return await _exchange(connection, commands)
                finally:
                    # A second cancellation must not keep it from coming back.
                    await asyncio.shield(self._pool.release(connection))
        except TimeoutError:
            raise RedisUnavailable(f"no answer in {self._timeout_s:g} s") from None
        except (RedisError, OSError) as error:
            raise RedisUnavailable(str(error) or type(error).__name__) from None

    async def check(self, command: Command) -> None:
        await redis_link.check(self, command)

    async def info(self) -> list[dict[str, str]]:
        return await redis_link.info(self)

    def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        return redis_link.scan(self, pattern)

    async def close(self) -> None:
        await self._pool.aclose()


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    try:
        await connection.send_packed_command(cast("list[bytes]", pack(commands)))
        return [await _reply(connection) for _ in commands]
    except BaseException:
        # Replies may still come: nobody else must read them.
        await connection.disconnect(nowait=True)
        raise


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


def _connection_class(address: RedisAddress) -> type[AbstractConnection]:
    if address.path:
        return UnixDomainSocketConnection
    return SSLConnection if address.tls else Connection

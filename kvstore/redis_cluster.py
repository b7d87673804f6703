"""Calls to a Redis Cluster: redis-py finds the shard of each key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from kvstore.redis_address import RedisAddress
from kvstore.redis_link import SCAN_COUNT, Command, RedisUnavailable

T = TypeVar("T")
FAILURES = (RedisError, RedisClusterException, OSError)


class ClusterLink:
    """See Link. Each node has a pool, the connection that rested longest first.

    `timeout_s`: for a whole call, redirections included.
    """

    def __init__(
        self,
        address: RedisAddress,
        *,
        max_connections: int,
        connect_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        # A call takes one connection of a node at most. redis-py has no pool of a cluster
        # that waits: one connection too many is an error.
        self._connections = asyncio.Semaphore(max_connections)
        arguments = address.redis_py_arguments()
        del arguments["db"]
        self._redis: RedisCluster = RedisCluster(
            **arguments,
            ssl=address.tls,
            max_connections=max_connections,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=timeout_s,
            # The second try is for a shard that has moved to another node.
            retry=Retry(NoBackoff(), 1),
            protocol=2,
            driver_info=None,
        )

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        async def execute() -> list[Any]:
            pipeline = self._redis.pipeline()
            for command in commands:
                pipeline.execute_command(*_as_redis_py_has_it(command))
            return await pipeline.execute(raise_on_error=False)

        return await self._within_timeout(execute)

    async def check(self, command: Command) -> None:
        async def execute() -> Any:
            await self._redis.ping(target_nodes=RedisCluster.PRIMARIES)
            return await self._redis.execute_command(*_as_redis_py_has_it(command))

        await self._within_timeout(execute)

    async def info(self) -> list[dict[str, str]]:
        async def execute() -> Any:
            return await self._redis.info(target_nodes=RedisCluster.PRIMARIES)

        answer = await self._within_timeout(execute)
        nodes = answer.values() if _is_by_node(answer) else [answer]
        return [{name: _as_text(value) for name, value in node.items()} for node in nodes]

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        keys: list[bytes] = []
        try:
            async for key in self._redis.scan_iter(match=pattern, count=SCAN_COUNT):
                keys.append(key)
                if len(keys) == SCAN_COUNT:
                    yield keys
                    keys = []
        except FAILURES as error:
            raise RedisUnavailable(_text_of(error)) from None
        yield keys

    async def close(self) -> None:
        await self._redis.aclose()

    async def _within_timeout(self, execute: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s), self._connections:
                return await execute()
        except TimeoutError:
            raise RedisUnavailable(f"no answer in {self._timeout_s:g} s") from None
        except FAILURES as error:
            raise RedisUnavailable(_text_of(error)) from None


def _as_redis_py_has_it(command: Command) -> tuple[Any, ...]:
    """It looks commands up by name, which must be a str."""
    return (bytes(command[0]).decode(), *command[1:])


def _is_by_node(answer: dict[str, Any]) -> bool:
    return all(isinstance(value, dict) for value in answer.values())


def _as_text(value: Any) -> str:
    """As Redis wrote it; redis-py takes "keys=1,expires=0" apart."""
    if isinstance(value, dict):
        return ",".join(f"{name}={part}" for name, part in value.items())
    return str(value)


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__

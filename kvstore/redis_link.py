"""How commands get to Redis and replies come back: one interface, three ways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

Bulk: TypeAlias = bytes | memoryview
Command: TypeAlias = tuple[Bulk, ...]

JOINED_BYTES = 4096  # larger arguments are not copied
SCAN_COUNT = 512


class RedisUnavailable(Exception):
    """No answer came: refused, reset, timed out. Says why, and holds no credentials."""


class ConnectionLost(RedisUnavailable):
    """It ended under a call: perhaps it was old, and a new one would do."""


class Link(Protocol):
    """A way to one Redis, or to one Redis Cluster. Connects when first used, and again."""

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, in order; an error reply is an exception in its place.

        Raises RedisUnavailable within the timeout. A cancelled call leaves nothing
        behind that a later call would have to wait for longer than for its reply.
        """
        ...

    async def check(self, command: Command) -> None:
        """Raises RedisUnavailable unless every primary takes a command like this one."""
        ...

    async def info(self) -> list[dict[str, str]]:
        """INFO of each primary; none if we may not ask. Raises RedisUnavailable."""
        ...

    def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """Pages of keys of all primaries. Raises RedisUnavailable."""
        ...

    async def close(self) -> None: ...


def pack(commands: Iterable[Command]) -> list[Bulk]:
    """RESP, in as few pieces as there are without copying large arguments."""
    pieces: list[Bulk] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            small += b"$%d\r\n" % len(argument)
            if len(argument) <= JOINED_BYTES:
                small += argument
            else:
                pieces += (bytes(small), argument)
                small.clear()
            small += b"\r\n"
    return [*pieces, bytes(small)]


def parse_info(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


async def check(link: Link, command: Command) -> None:
    """Of a single Redis."""
    (reply,) = await link.call([command])
    if isinstance(reply, Exception):
        raise RedisUnavailable(str(reply))


async def info(link: Link) -> list[dict[str, str]]:
    """Of a single Redis."""
    (reply,) = await link.call([(b"INFO",)])
    return [parse_info(reply)] if isinstance(reply, bytes) else []


async def scan(link: Link, pattern: bytes) -> AsyncIterator[list[bytes]]:
    """Of a single Redis."""
    cursor = b"0"
    while True:
        command = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)
        (reply,) = await link.call([command])
        if isinstance(reply, Exception):
            raise RedisUnavailable(str(reply))
        cursor, keys = reply
        yield keys
        if cursor == b"0":
            return

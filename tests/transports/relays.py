"""What lies between a caller and a server, and may be cut."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from services.runtime.local_sockets import host_id
from services.runtime.tasks import end_tasks

UNIX = "unix-abstract:"

Pair: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """`address`: where it listens, a port or a unix socket as `target` is one."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @property
    def num_connections(self) -> int:
        return len(self._writers) // 2

    def cut(self) -> None:
        """All connections that there are, at once and without a word."""
        for writer in self._writers:
            writer.transport.abort()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not asyncio's task, which complains when it is cancelled.
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind = await open_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        writers = {writer, behind[1]}
        self._writers |= writers
        try:
            await asyncio.gather(_pipe(reader, behind[1]), _pipe(behind[0], writer))
        finally:
            self._writers -= writers

    async def close(self) -> None:
        self.cut()
        await end_tasks(self._tasks)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


async def open_connection(address: str) -> Pair:
    if address.startswith(UNIX):
        return await asyncio.open_unix_connection("\0" + address.removeprefix(UNIX))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


@asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    if target.startswith(UNIX):
        name = f"firsttoken-{host_id()}-{secrets.token_hex(16)}"
        server = await asyncio.start_unix_server(relay.serve, path=f"\0{name}")
        relay.address = UNIX + name
    else:
        server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        relay.address = f"{host}:{port}"
    async with server:
        yield relay
        server.close()
        await relay.close()

"""What may lie between two processes: it forgets connections that rest, and tells nobody."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.runtime.tasks import end_tasks

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    def __init__(self, front: Pair, behind: Pair) -> None:
        self.ways = ((front[0], behind[1]), (behind[0], front[1]))
        self.used_s = time.monotonic()
        self.is_forgotten = False

    async def pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    self.used_s = time.monotonic()
                    if not self.is_forgotten:
                        writer.write(data)
                        await writer.drain()
        finally:
            writer.close()


class ForgetfulProxy:
    """`address`: where it listens."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._connections: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @property
    def used_s(self) -> float:
        """When something last went over one of them, by time.monotonic()."""
        return max((each.used_s for each in self._connections), default=0.0)

    def forget(self, *, unused_since_s: float) -> None:
        """Those over which nothing went since then, by time.monotonic(), stay open, and nothing
        that is sent on them arrives any more."""
        for connection in self._connections:
            connection.is_forgotten |= connection.used_s < unused_since_s

    def close_connections(self) -> None:
        """As when the peer was killed and another one listens in its place."""
        for connection in self._connections:
            for _, writer in connection.ways:
                writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(self._host, int(self._port))
        connection = _Connection((reader, writer), behind)
        self._connections.append(connection)
        for way in connection.ways:
            task = asyncio.create_task(connection.pipe(*way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await end_tasks(self._tasks)


@asynccontextmanager
async def forgetful_proxy(target: str) -> AsyncIterator[ForgetfulProxy]:
    """In front of `target`, host:port."""
    proxy = ForgetfulProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()

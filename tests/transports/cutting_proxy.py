"""What lies between two services and may cut their connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.core.settings import MeshSettings
from services.runtime.local_sockets import local_address_for
from services.runtime.tasks import end_tasks

UNIX = "unix-abstract:"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(address: str) -> Pair:
    if address.startswith(UNIX):
        return await asyncio.open_unix_connection(path="\0" + address.removeprefix(UNIX))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


class CuttingProxy:
    """`address`: where it listens, in the manner of `target`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._pipes: set[asyncio.Task[None]] = set()
        self.address = ""
        self.num_accepted = 0

    def cut(self, *, gently: bool = False) -> None:
        """All connections at both ends: a reset, or `gently` an end of file. A unix socket knows
        no reset."""
        for writer in self._open:
            end: socket.socket = writer.get_extra_info("socket")
            if not gently and end.family != socket.AF_UNIX:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._open.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            behind_reader, behind_writer = await connect(self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, behind_writer}
        for pair in ((reader, behind_writer), (behind_reader, writer)):
            task = asyncio.create_task(self._pipe(*pair))
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
        finally:
            self._open.discard(writer)
            writer.close()

    async def close(self) -> None:
        self.cut()
        await end_tasks(self._pipes)


@asynccontextmanager
async def cutting_proxy(target: str) -> AsyncIterator[CuttingProxy]:
    """In front of `target`: host:port, or an abstract unix socket."""
    proxy = CuttingProxy(target)
    if target.startswith(UNIX):
        proxy.address = local_address_for(MeshSettings())
        path = "\0" + proxy.address.removeprefix(UNIX)
        server = await asyncio.start_unix_server(proxy.serve, path)
    else:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()

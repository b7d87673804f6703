"""Memory handed from process to process on one host.

The owner listens on an abstract unix socket: it has no file, so that nothing is left
behind however the owner ends. Whoever connects is given the memory's descriptor.
Whether that works decides whether two processes share a host; nobody has to be told.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from types import TracebackType
from typing import Self

import numpy as np

from services.core.kvblocks import Bytes
from services.runtime.tasks import end_tasks

NAME_PREFIX = "@firsttoken-"
MAX_DESCRIPTION_BYTES = 1 << 14
OPEN_TIMEOUT_S = 2.0
ACCEPT_RETRY_S = 0.1
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def create_memory(name: str, num_bytes: int) -> int:
    """A descriptor of zeroed memory, gone with the last process that holds it.

    Sealed: no holder can shrink it under another's feet (SIGBUS).
    """
    import fcntl

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class SharedMemory:
    """Memory of this or another process, mapped here.

    `array`: uint8, one dimension. Its pages stay mapped until the last array made
    from it is gone.
    """

    def __init__(self, fd: int, description: bytes = b"", *, writable: bool = True) -> None:
        """Does not take `fd` over."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapped = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=access)
        self.array: Bytes = np.frombuffer(self._mapped, dtype=np.uint8)
        self.description = description

    def close(self) -> None:
        self.array = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # somebody still looks at it
            self._mapped.close()


class MemoryServer:
    """Hands `fd` and `description` to every process of the same user that asks.

    An async context manager. `description` may be changed at any time. `fd` is not taken
    over, and must stay open meanwhile. Where there are no abstract sockets it hands
    nothing out, and its name is empty.
    """

    def __init__(self, fd: int, description: bytes = b"") -> None:
        self._fd = fd
        self.description = description
        # "@" stands for the zero byte of an abstract socket's name, as in /proc/net/unix.
        self.name = NAME_PREFIX + secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if sys.platform != "linux":
            self.name = ""
            return self
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(_address(self.name))
        self._listener.listen(128)
        self._task = asyncio.create_task(self._serve(self._listener), name="memory server")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files: some will be closed
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            with peer, contextlib.suppress(OSError):
                if _is_same_user(peer):
                    # A new socket's buffer has room for all of it at once.
                    length = len(self.description).to_bytes(4, "little")
                    socket.send_fds(peer, [length + self.description], [self._fd])


async def open_shared(name: str, *, writable: bool = True) -> SharedMemory:
    """Map the memory that a MemoryServer called `name` hands out.

    Raises OSError when there is none: the owner is on another host, or gone.
    """
    if not name.startswith(NAME_PREFIX) or sys.platform != "linux":
        raise OSError(f"no memory is shared as {name!r} here")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        async with asyncio.timeout(OPEN_TIMEOUT_S):  # TimeoutError is an OSError
            await asyncio.get_running_loop().sock_connect(connection, _address(name))
            if not _is_same_user(connection):
                raise PermissionError(f"{name} belongs to another user")
            await _readable(connection)
        received, fds, _, _ = socket.recv_fds(connection, 4 + MAX_DESCRIPTION_BYTES, 1)
    try:
        length = int.from_bytes(received[:4], "little")
        if not fds or length != len(received) - 4:
            raise ConnectionError(f"{name} gave no memory")
        return SharedMemory(fds[0], received[4:], writable=writable)
    finally:
        for fd in fds:
            os.close(fd)


def _address(name: str) -> bytes:
    return b"\0" + name[1:].encode()


def _is_same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

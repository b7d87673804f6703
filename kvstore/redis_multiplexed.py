"""One connection for all calls: commands go out as they come, replies return in order.

No pool to wait for and no connection to go stale unseen: a server that closes it is
noticed at once. hiredis parses; what is received is not decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import hiredis

from kvstore import redis_link
from kvstore.redis_address import RedisAddress
from kvstore.redis_link import Command, ConnectionLost, RedisUnavailable, pack
from services.runtime.tasks import end_tasks

RECEIVE_BYTES = 256 * 1024
# hiredis gives its buffer back when it is larger than this and empty: below the size
# of a reply, each reply would grow it from nothing again.
KEPT_PARSER_BYTES = 16 * 1024 * 1024


class MultiplexedLink:
    """See Link. `timeout_s`: without a byte either way, while replies are due."""

    def __init__(
        self, address: RedisAddress, *, connect_timeout_s: float, timeout_s: float
    ) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._closed = False

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._connection
        if connection is not None and connection.usable:
            # The server may just have closed it. All our commands may be sent twice.
            with contextlib.suppress(ConnectionLost):
                return await connection.call(commands)
        connection = await self._connected()
        return await connection.call(commands)

    async def check(self, command: Command) -> None:
        await redis_link.check(self, command)

    async def info(self) -> list[dict[str, str]]:
        return await redis_link.info(self)

    def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        return redis_link.scan(self, pattern)

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            await end_tasks([self._connecting])
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> _Connection:
        if self._connection is not None and self._connection.usable:
            return self._connection
        if self._closed:
            raise RedisUnavailable("closed")
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="redis: connect")
            self._connecting.add_done_callback(self._connect_ended)
        # Others wait for the same connection: the first who came may leave.
        return await asyncio.shield(self._connecting)

    def _connect_ended(self, task: asyncio.Task[_Connection]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._connection = task.result()

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._open()
                try:
                    await self._introduce(connection)
                except BaseException:
                    connection.abort()
                    raise
                return connection
        except TimeoutError:
            raise RedisUnavailable(f"no connection in {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise RedisUnavailable(str(error) or type(error).__name__) from None

    async def _open(self) -> _Connection:
        loop, address = asyncio.get_running_loop(), self._address
        if address.path:
            _, connection = await loop.create_unix_connection(self._make, address.path)
        else:
            _, connection = await loop.create_connection(
                self._make, address.host, address.port, ssl=address.ssl_context()
            )
        return connection

    def _make(self) -> _Connection:
        return _Connection(self._timeout_s)

    async def _introduce(self, connection: _Connection) -> None:
        commands: list[Command] = []
        if credentials := self._address.credentials():
            commands.append((b"AUTH", *(part.encode() for part in credentials)))
        if self._address.db:
            commands.append((b"SELECT", b"%d" % self._address.db))
        for reply in await connection.call(commands) if commands else ():
            if isinstance(reply, Exception):
                raise RedisUnavailable(str(reply))


class _Call:
    __slots__ = ("answered", "num_replies", "replies")

    def __init__(self, num_replies: int) -> None:
        self.num_replies = num_replies
        self.replies: list[Any] = []
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
        self._reader.setmaxbuf(KEPT_PARSER_BYTES)
        self._buffer = bytearray(RECEIVE_BYTES)
        self._calls: deque[_Call] = deque()
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._progress_s = 0.0
        self._num_unsent = 0
        self._watch: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("the connection is closed")
        call = _Call(len(commands))
        if not self._calls:
            self._progress_s = self._loop.time()
        self._calls.append(call)
        self._transport.writelines(pack(commands))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._look_for_progress)
        # Cancelled: the replies are still counted off, and dropped.
        await call.answered
        return call.replies

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        self.abort()
        await self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one as well, though not a subclass.
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        # asyncio's TLS reads into slices of it: those of a bytearray would be copies.
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self._progress_s = self._loop.time()
        self._reader.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type]  # takes any buffer
        try:
            while (reply := self._reader.gets(False)) is not _NOT_YET:
                self._answer(reply)
        except hiredis.ProtocolError:
            self._fail(RedisUnavailable("what came is not the Redis protocol"))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionLost(str(error or "") or "the server closed the connection"))
        if not self._lost.done():
            self._lost.set_result(None)

    def _answer(self, reply: Any) -> None:
        if not self._calls:
            self._fail(RedisUnavailable("a reply came that nobody asked for"))
            return
        call = self._calls[0]
        call.num_replies -= 1
        if not call.answered.done():
            call.replies.append(reply)
        if call.num_replies == 0:
            self._calls.popleft()
            if not call.answered.done():
                call.answered.set_result(None)

    def _look_for_progress(self) -> None:
        self._watch = None
        if not self._calls or self._transport is None:
            return
        num_unsent = self._transport.get_write_buffer_size()
        if 0 < num_unsent < self._num_unsent:
            self._progress_s = self._loop.time()
        self._num_unsent = num_unsent
        left_s = self._progress_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look_for_progress)
        else:
            self._fail(RedisUnavailable(f"no answer in {self._timeout_s:g} s"))

    def _fail(self, error: RedisUnavailable) -> None:
        """Nothing that comes later could be told apart: the connection ends."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.answered.done():
                call.answered.set_exception(error)
        self.abort()


_NOT_YET = object()

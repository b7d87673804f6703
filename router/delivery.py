"""What one client is sent: in order, and at its own pace, which is nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc

from services.core.errors import Overloaded
from services.runtime.interceptor import Context
from services.runtime.tasks import end_tasks

# What a write raises when the client leaves meanwhile.
CLIENT_GONE = (grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError)


class Delivery:
    """An async context manager; leaving it waits until the client has taken everything.

    A client that does not read holds up neither a worker nor an engine: messages wait
    here, up to `max_unread_bytes`. An error that leaves the context comes behind them
    too: gRPC sends no status while a message waits.
    """

    def __init__(self, context: Context, *, max_unread_bytes: int) -> None:
        self._context = context
        self._max_unread_bytes = max_unread_bytes
        self._messages: list[bytes] = []
        self._num_taken = 0
        self._unread_bytes = 0
        self._gone = False
        self._more = asyncio.Event()
        self._all_taken = asyncio.Event()
        self._all_taken.set()

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._write(), name="write to a client")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None or isinstance(error, Exception):
                await self._flush()
        finally:
            await end_tasks([self._writing])

    @property
    def messages(self) -> Sequence[bytes]:
        """All that the client has, or will have."""
        return self._messages

    def send(self, message: bytes) -> None:
        """Raises Overloaded when too much waits for the client."""
        if self._unread_bytes > self._max_unread_bytes:
            raise Overloaded(
                f"the client reads too slowly: {self._unread_bytes} bytes of its answer wait"
                " (router.max_unread_bytes)",
                reason="SLOW_CLIENT",
            )
        self._messages.append(message)
        self._unread_bytes += len(message)
        self._all_taken.clear()
        self._more.set()

    async def _flush(self) -> None:
        await self._all_taken.wait()
        if self._gone:
            raise asyncio.CancelledError("the client is gone")

    async def _write(self) -> None:
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                while self._num_taken < len(self._messages):
                    message = self._messages[self._num_taken]
                    await self._context.write(message)
                    self._num_taken += 1
                    self._unread_bytes -= len(message)
                self._all_taken.set()
        except CLIENT_GONE:  # gRPC is about to cancel the request
            self._gone = True
            self._all_taken.set()

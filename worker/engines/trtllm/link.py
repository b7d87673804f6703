"""The core's end of the socket pair to the front, for a loop: worker.link blocks."""

from __future__ import annotations

import asyncio
import pickle
import socket
from types import TracebackType
from typing import Self

from worker.link import LENGTH, LinkClosed
from worker.messages import Command, Report


class AsyncLink:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=self._connection, limit=1 << 24
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()

    async def receive(self) -> list[Command]:
        """The next batch. Raises LinkClosed."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            commands: list[Command] = pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkClosed from error
        return commands

    def send(self, report: Report) -> None:
        payload = pickle.dumps(report, protocol=5)
        if not self._writer.is_closing():  # the reader notices that the front is gone
            self._writer.write(LENGTH.pack(len(payload)) + payload)

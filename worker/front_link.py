"""The front's end of the socket pair to the core (link.py)."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from worker.link import LENGTH, LinkClosed
from worker.messages import Command, Report


class FrontLink:
    """The front's end. Commands of one turn of the event loop leave as one batch."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox: list[Command] = []

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

    def send(self, command: Command) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    async def receive(self) -> Report:
        """Raises LinkClosed."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            report: Report = pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkClosed from error
        return report

    def _flush(self) -> None:
        batch: Sequence[Command] = self._outbox
        self._outbox = []
        if self._writer.is_closing():
            return  # the reader notices that the core is gone
        payload = pickle.dumps(batch, protocol=5)
        self._writer.write(LENGTH.pack(len(payload)) + payload)

"""The socket pair between front and core: batches of messages, length-prefixed.

The core's end blocks, the front's end is asyncio. A batch is a pickle, which is
safe between a parent and the child it started, and nowhere else.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from worker.messages import Command, Report

_LENGTH = struct.Struct("<I")


class LinkClosed(Exception):
    """The other process is gone."""


class CoreLink:
    """The core's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self, *, wait_s: float | None) -> list[Command]:
        """All commands that have arrived; waits for one so long, None: for ever.

        Raises LinkClosed.
        """
        commands: list[Command] = []
        while self._readable(0 if commands else wait_s):
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            commands += pickle.loads(self._read(length))
        return commands

    def send(self, report: Report) -> None:
        """Raises LinkClosed."""
        payload = pickle.dumps(report, protocol=5)
        try:
            self._connection.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise LinkClosed from error

    def _readable(self, wait_s: float | None) -> bool:
        return bool(select.select([self._connection], [], [], wait_s)[0])

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._connection.recv_into(view)
            except OSError as error:
                raise LinkClosed from error
            if not count:
                raise LinkClosed
            view = view[count:]
        return data


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
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
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
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

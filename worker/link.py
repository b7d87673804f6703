"""The socket pair between front and core: batches of messages, length-prefixed.

The core's end, which blocks; the front's end, front_link.py, is asyncio, which a core starts
without. A batch is a pickle, which is safe between a parent and the child it started, and
nowhere else.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct

from worker.messages import Command, Report

LENGTH = struct.Struct("<I")


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
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            commands += pickle.loads(self._read(length))
        return commands

    def send(self, report: Report) -> None:
        """Raises LinkClosed."""
        payload = pickle.dumps(report, protocol=5)
        try:
            self._connection.sendall(LENGTH.pack(len(payload)) + payload)
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

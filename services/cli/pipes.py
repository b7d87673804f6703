"""Lines out of a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

CHUNK_BYTES = 1 << 16


async def read_line(fd: int) -> str:
    """The first line, or "" when every writer has closed the pipe before one. Closes `fd`."""
    async with _reading(fd) as reader:
        return (await reader.readline()).decode().strip()


async def read_lines(fd: int, on_line: Callable[[str], None]) -> None:
    """Call `on_line` for each line until every writer has closed the pipe. Closes `fd`.

    Reads chunks, since a stream's readline() fails on a line longer than its limit.
    """
    rest = b""
    async with _reading(fd) as reader:
        while chunk := await reader.read(CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                on_line(line.decode(errors="replace"))
        if rest:
            on_line(rest.decode(errors="replace"))


@contextlib.asynccontextmanager
async def _reading(fd: int) -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        yield reader
    finally:
        transport.close()

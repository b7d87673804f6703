"""Lines out of a pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

CHUNK_BYTES = 1 << 16


async def read_lines(fd: int, on_line: Callable[[str], None]) -> None:
    """Call `on_line` for each line until every writer has closed the pipe. Closes `fd`.

    Reads chunks, since a stream's readline() fails on a line longer than its limit.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    rest = b""
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                on_line(line.decode(errors="replace"))
        if rest:
            on_line(rest.decode(errors="replace"))
    finally:
        transport.close()

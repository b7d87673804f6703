"""For a program that watches no lifeline itself: it ends when this process is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator

# Its standard input ends when nobody is left who could write there.
_WATCH = 'read -r _; kill -s TERM -- "$1" && sleep "$2" && kill -s KILL -- "$1"'


@contextlib.asynccontextmanager
async def ended_with_us(target: int, *, grace_s: float) -> AsyncIterator[None]:
    """While entered, a small shell watches this process, and ends `target` when it dies.

    `target` is a pid, or a process group as a negative number.
    """
    read_fd, write_fd = os.pipe()
    try:
        watcher = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _WATCH, "sh", str(target), f"{grace_s:g}"),
            stdin=read_fd,
            stdout=DEVNULL,
            stderr=DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
    except BaseException:
        os.close(write_fd)
        raise
    finally:
        os.close(read_fd)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            watcher.kill()
        os.close(write_fd)
        await watcher.wait()

"""Programs that a benchmark starts beside a mesh: our own, and servers of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, NamedTuple

from services.core.errors import InvalidArgument
from services.runtime.startup import StartupError

STOP_TIMEOUT_S = 10.0
TAIL_BYTES = 600


class Program(NamedTuple):
    pid: int
    # host:port
    address: str


@asynccontextmanager
async def program(module: str, *arguments: str) -> AsyncIterator[Program]:
    """A node of ours that joins no mesh. It ends when this process does, however that ends.

    Raises StartupError.
    """
    ready_fd, ready_write_fd = os.pipe()
    lifeline_fd, held_fd = os.pipe()
    with tempfile.TemporaryFile() as output:
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                *("--ready-fd", str(ready_write_fd), "--lifeline-fd", str(lifeline_fd)),
                pass_fds=(ready_write_fd, lifeline_fd),
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(ready_write_fd)
            os.close(lifeline_fd)
        try:
            # Its end closes the pipe, too.
            address = await asyncio.to_thread(os.read, ready_fd, 1024)
            if not address:
                raise StartupError(f"{module} ended while starting: {_tail(output)}")
            yield Program(child.pid, address.decode().strip())
        finally:
            await _stop(child)
            os.close(ready_fd)
            os.close(held_fd)


class Command:
    """A server of somebody else, with all that it has started. What it prints is kept."""

    def __init__(self, child: Process, output: IO[bytes]) -> None:
        self._child = child
        self._output = output

    @property
    def pid(self) -> int:
        return self._child.pid

    def require_running(self) -> None:
        """Raises StartupError with its last words."""
        status = self._child.returncode
        if status is not None:
            raise StartupError(f"--command: it ended with exit status {status}: {self.tail()}")

    def tail(self) -> str:
        return _tail(self._output)


def split_command(line: str) -> list[str]:
    """Raises InvalidArgument."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidArgument.of("--command", f"cannot be split into words: {error}") from None
    if not words:
        raise InvalidArgument.of("--command", "must name a program")
    return words


@asynccontextmanager
async def command(line: str) -> AsyncIterator[Command]:
    """No shell reads `line`. Raises InvalidArgument and StartupError."""
    words = split_command(line)
    with tempfile.TemporaryFile() as output:
        try:
            child = await asyncio.create_subprocess_exec(
                *words, stdin=DEVNULL, stdout=output, stderr=STDOUT, start_new_session=True
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StartupError(f"--command: cannot start {words[0]}: {reason}") from error
        try:
            yield Command(child, output)
        finally:
            await _stop(child)


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, os.fstat(output.fileno()).st_size - TAIL_BYTES))
    return output.read().decode(errors="replace").strip() or "it said nothing"


async def _stop(child: Process) -> None:
    """With all of its session."""
    _signal(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await child.wait()
    except TimeoutError:
        _signal(child, signal.SIGKILL)
        await child.wait()


def _signal(child: Process, number: signal.Signals) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

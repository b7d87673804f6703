"""Real processes of the mesh, as a supervisor starts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

DEADLINE_S = 60.0


class Running:
    """A started process that has said where it listens."""

    def __init__(self, process: Process, address: str, lifeline: int) -> None:
        self.process = process
        self.address = address
        self._lifeline = lifeline

    def cut_lifeline(self) -> None:
        """What the kernel does when the parent dies."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> tuple[int, str]:
        """Its exit code and what it wrote on stderr."""
        _, errors = await asyncio.wait_for(self.process.communicate(), DEADLINE_S)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


async def run(*arguments: str) -> tuple[int, str, str]:
    """Run `python -m …` to its end: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=PIPE, stderr=PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


@contextlib.asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[Running]:
    """`python -m …` with both descriptors, from its readiness to its end, whatever happens."""
    ready_read, ready_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        *("--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)),
        pass_fds=(ready_write, lifeline_read),
        stdout=PIPE,
        stderr=PIPE,
    )
    os.close(ready_write)
    os.close(lifeline_read)
    address = await asyncio.to_thread(_read_to_end, ready_read)
    started = Running(process, address.strip(), lifeline_write)
    try:
        yield started
    finally:
        started.cut_lifeline()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def _read_to_end(descriptor: int) -> str:
    with os.fdopen(descriptor) as pipe:
        return pipe.read()

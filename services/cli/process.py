"""One service as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Callable
from dataclasses import dataclass

from services.cli.pipes import read_line, read_lines
from services.runtime.process import INSECURE_VARIABLE
from services.runtime.tls import TLS_DIR_VARIABLE

READY_TIMEOUT_S = 180.0
# A service is told by its options alone what the mesh that it is started for has.
NOT_INHERITED = (TLS_DIR_VARIABLE, INSECURE_VARIABLE)
# Longer than a node's own drain, which is bounded too.
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A program of the mesh and how to call it."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"
    # Others were told its address: it is started again on the port it had.
    keeps_address: bool = False


class NotReady(Exception):
    """The service ended, or took too long, before it said that it serves."""


class Process:
    """A running service, in a session of its own.

    So a terminal's Ctrl-C reaches only the command, which stops the services in order.
    """

    def __init__(
        self, child: asyncio.subprocess.Process, ready_fd: int, output: asyncio.Task[None]
    ) -> None:
        self._child = child
        self._ready_fd = ready_fd
        self._output = output

    @classmethod
    async def start(
        cls, service: Service, *, lifeline_fd: int, on_line: Callable[[str], None]
    ) -> Process:
        """`lifeline_fd`: read end of a pipe whose write end only this process holds."""
        ready_fd, ready_write_fd = os.pipe()
        # Not asyncio's PIPE: waiting for the child would then also wait for whatever
        # it left behind that still holds its output.
        output_fd, output_write_fd = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", service.module, *service.arguments),
                *("--listen", service.listen),
                *("--ready-fd", str(ready_write_fd)),
                *("--lifeline-fd", str(lifeline_fd)),
                pass_fds=(ready_write_fd, lifeline_fd),
                env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED},
                stdin=DEVNULL,
                stdout=output_write_fd,
                stderr=output_write_fd,
                start_new_session=True,
            )
        finally:
            os.close(ready_write_fd)
            os.close(output_write_fd)
        return cls(child, ready_fd, asyncio.create_task(read_lines(output_fd, on_line)))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ready(self) -> str:
        """The address on which it serves. Call it once. Raises NotReady."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                address = await read_line(self._ready_fd)
                ending = "" if address else await self.wait()
        except TimeoutError:
            self.kill()
            raise NotReady(f"was not ready after {READY_TIMEOUT_S:g} s") from None
        if ending:
            raise NotReady(f"ended while starting ({ending})")
        return address

    async def wait(self) -> str:
        """How it ended: "exit status 3", "SIGKILL". Its last lines have been read."""
        status = await self._child.wait()
        # A grandchild may hold the pipe open: it is not waited for.
        await asyncio.wait([self._output], timeout=0.2)
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ask it to end, and end it if it does not. May be called twice."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
        self._output.cancel()

    def kill(self) -> None:
        """End it and what it started, at once."""
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

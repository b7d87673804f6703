"""Another server, measured beside the mesh: a command line, and where it then answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from firsttoken.client import MeshClient, MeshError
from services.bench.overhead_rows import Client, Http, Row
from services.bench.programs import Command, command, split_command
from services.core.errors import InvalidArgument
from services.runtime.startup import StartupError

COMMAND, COMMAND_GRPC = "command", "command grpc"
POLL_S = 0.2
# One request, however long its model's first answer takes.
ANSWER_TIMEOUT_S = 60.0


class Foreign(NamedTuple):
    """`url`: an OpenAI-compatible server's; `address`: host:port of an InferenceService."""

    line: str
    url: str = ""
    address: str = ""
    model: str = ""
    start_timeout_s: float = 300.0

    def check(self) -> None:
        """Raises InvalidArgument."""
        if not self.line and (self.url or self.address):
            raise InvalidArgument.of("--command", "is missing: what is to answer there?")
        if not self.line:
            return
        split_command(self.line)
        if not (self.url or self.address):
            raise InvalidArgument.of(
                "--command", "needs --command-url or --command-grpc: where does it answer?"
            )
        if self.url and not _is_url(self.url):
            raise InvalidArgument.of("--command-url", f"must be http://HOST:PORT; got {self.url!r}")
        if self.address and not self.address.rpartition(":")[2].isdecimal():
            raise InvalidArgument.of("--command-grpc", f"must be HOST:PORT; got {self.address!r}")


class Opened(NamedTuple):
    rows: dict[str, Row]
    pid: int


@asynccontextmanager
async def open_foreign(foreign: Foreign) -> AsyncIterator[Opened]:
    """Entered, it has answered once on each way; left, it is gone. Raises StartupError."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(command(foreign.line))
        rows: dict[str, Row] = {}
        if foreign.url:
            more: dict[str, Any] = {"model": foreign.model} if foreign.model else {}
            rows[COMMAND] = Http(foreign.url, stack, **more)
        if foreign.address:
            client = await stack.enter_async_context(MeshClient(foreign.address))
            rows[COMMAND_GRPC] = Client(client)
        for row in rows.values():
            await _first_answer(row, running, foreign)
        yield Opened(rows, running.pid)


async def _first_answer(row: Row, running: Command, foreign: Foreign) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + foreign.start_timeout_s
    request = await row.prepare("Once upon a time", 1)
    where = foreign.url if isinstance(row, Http) else foreign.address
    while True:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await row.ask(request)
                return
        except (OSError, MeshError) as error:  # ConnectionError and TimeoutError are OSErrors
            problem = str(error) or "its answer does not end"
        # Before who else may answer there is believed.
        running.require_running()
        if problem.startswith("HTTP/1.1 4"):
            raise StartupError(f"--command: {where} refuses what it is asked: {problem}")
        if loop.time() > until_s:
            waited = f"{foreign.start_timeout_s:g} s"
            raise StartupError(
                f"--command: nothing answers at {where} after {waited}: {problem};"
                f" it said: {running.tail()}"
            )
        await asyncio.sleep(POLL_S)


def _is_url(url: str) -> bool:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    return False

"""A command of the user's, run beside the mesh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from services.cli.lifeline import ended_with_us

GRACE_S = 5.0


async def run_shell_command(command: str, environment: Mapping[str, str]) -> int:
    """Its exit status, 128 + N when signal N ended it. Cancelled, it ends the command first.

    It finds `firsttoken` first where this one runs, on PATH or not.

    On a terminal the command shares the foreground, so that it can read from it and
    Ctrl-C reaches it; elsewhere it has a process group of its own, to be ended whole.
    """
    own_group = not sys.stdin.isatty()
    child = await asyncio.create_subprocess_shell(
        command,
        env={**os.environ, "PATH": _path(), **environment},
        process_group=0 if own_group else None,
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            target = -child.pid if own_group else child.pid
            await stack.enter_async_context(ended_with_us(target, grace_s=GRACE_S))
            status = await child.wait()
        finally:
            if child.returncode is None:
                await _end(child, own_group=own_group)
    return status if status >= 0 else 128 - status


def _path() -> str:
    scripts = Path(sys.executable).parent
    return os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)])


async def _end(child: asyncio.subprocess.Process, *, own_group: bool) -> None:
    target = -child.pid if own_group else child.pid
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await child.wait()
                return

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from services.cli.lifeline import ended_with_us

# Watches over the target in argv, and is killed meanwhile.
KILLED = """
import asyncio, os, signal, sys
from services.cli.lifeline import ended_with_us

async def main():
    async with ended_with_us(int(sys.argv[1]), grace_s=0.2):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    target = await asyncio.create_subprocess_exec(
        *command, process_group=0, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield target
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(target.pid, signal.SIGKILL)
        await target.communicate()


async def run_killed(target: int) -> None:
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(target))
    assert await killed.wait() == -signal.SIGKILL


@pytest.mark.parametrize("sign", [1, -1], ids=["a process", "a group"])
async def test_the_target_is_asked_to_end_when_its_owner_is_killed(sign: int) -> None:
    async with running("sleep", "1000") as target, asyncio.timeout(30):
        await run_killed(sign * target.pid)
        status = await target.wait()

    assert status == -signal.SIGTERM


async def test_a_target_that_does_not_end_is_killed() -> None:
    script = "trap '' TERM; echo; while :; do sleep 1; done"
    async with running("/bin/sh", "-c", script) as target, asyncio.timeout(30):
        assert target.stdout is not None
        await target.stdout.readline()  # from here on it is deaf
        await run_killed(-target.pid)
        status = await target.wait()

    assert status == -signal.SIGKILL


async def test_a_target_outlives_the_watch_that_is_left() -> None:
    async with running("sleep", "1000") as target:
        async with ended_with_us(-target.pid, grace_s=0.0):
            pass
        await asyncio.sleep(0.3)

        assert target.returncode is None

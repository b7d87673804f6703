"""Processes of a mesh, to be killed or held up by a benchmark."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.runtime.startup import StartupError

POLL_S = 0.05


async def list_members(
    stub: control_pb2_grpc.ControlServiceStub, role: control_pb2.MemberRole.ValueType
) -> list[control_pb2.Member]:
    members = (await stub.ListMembers(control_pb2.ListMembersRequest())).members
    return [member for member in members if member.role == role]


def kill(members: Sequence[control_pb2.Member], control: str) -> None:
    """All at once. Raises StartupError, and kills nothing, where one is not of this machine."""
    for member in members:
        require_here(member, control)
    for member in members:
        os.kill(member.pid, signal.SIGKILL)


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Meanwhile they stand still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def family(member: control_pb2.Member, control: str) -> list[int]:
    """Its process, and those that it has started. Raises StartupError: not of this machine."""
    require_here(member, control)
    children = Path(f"/proc/{member.pid}/task/{member.pid}/children").read_text()
    return [member.pid, *map(int, children.split())]


def descendants(pid: int) -> list[int]:
    """The process, its children, and theirs; none of it once it has ended."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
        children = [int(each) for t in threads for each in (t / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(each for child in children for each in descendants(child))]


def cpu_s(pid: int) -> float:
    """Of all its threads, also those that have ended."""
    # clock_getcpuclockid(3), which Python lacks; /proc/PID/stat counts in hundredths of a second.
    return time.clock_gettime(~pid << 3 | 2)


def require_here(member: control_pb2.Member, control: str) -> None:
    if control not in _command_line(member.pid):
        raise StartupError(f"process {member.pid} of the mesh at {control} is not on this host")


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110  # other processes tell no event
            await asyncio.sleep(POLL_S)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []

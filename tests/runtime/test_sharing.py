from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.runtime.sharing import MemoryServer, SharedMemory, create_memory, open_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract unix sockets")

OWNER = """
import asyncio, sys
import numpy as np
from services.runtime.sharing import MemoryServer, SharedMemory, create_memory

async def main():
    fd = create_memory("test", 1 << 16)
    memory = SharedMemory(fd)
    memory.array[:5] = np.frombuffer(b"hello", dtype=np.uint8)
    async with MemoryServer(fd, b"greeting") as server:
        print(server.name, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memory("test", 1 << 16)
    yield fd
    os.close(fd)


async def test_both_see_what_either_writes(fd: int) -> None:
    ours = SharedMemory(fd)
    async with MemoryServer(fd, b"what it is") as server:
        theirs = await open_shared(server.name)
        ours.array[7] = 42
        theirs.array[8] = 43

        assert theirs.description == b"what it is"
        assert theirs.array.nbytes == 1 << 16
        assert theirs.array[7] == 42
        assert ours.array[8] == 43

        theirs.close()
    ours.close()


async def test_memory_may_be_opened_for_reading_only(fd: int) -> None:
    async with MemoryServer(fd) as server:
        theirs = await open_shared(server.name, writable=False)
        with pytest.raises(ValueError, match="read-only"):
            theirs.array[0] = 1
        theirs.close()


async def test_nobody_can_shrink_the_memory(fd: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)


async def test_a_description_may_change(fd: int) -> None:
    async with MemoryServer(fd, b"one") as server:
        server.description = b"two"
        theirs = await open_shared(server.name)

        assert theirs.description == b"two"

        theirs.close()


async def test_many_may_open_it_at_once(fd: int) -> None:
    async with MemoryServer(fd) as server:
        opened = await asyncio.gather(*(open_shared(server.name) for _ in range(50)))
        opened[0].array[0] = 9

        assert all(each.array[0] == 9 for each in opened)

        for each in opened:
            each.close()


@pytest.mark.parametrize("name", ["", "nonsense", "@firsttoken-" + "0" * 32])
async def test_memory_that_is_not_on_this_host_is_an_oserror(name: str) -> None:
    with pytest.raises(OSError, match=r"shared as|refused"):
        await open_shared(name)


async def test_a_closed_server_hands_out_nothing(fd: int) -> None:
    async with MemoryServer(fd) as server:
        pass
    await server.close()

    with pytest.raises(ConnectionRefusedError):
        await open_shared(server.name)


async def test_opening_and_closing_leaks_no_descriptor(fd: int) -> None:
    async def once() -> None:
        async with MemoryServer(fd) as server:
            (await open_shared(server.name)).close()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await once()

    assert len(os.listdir("/proc/self/fd")) == before


async def test_memory_outlives_a_killed_owner_and_its_socket_does_not() -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    name = (await owner.stdout.readline()).decode().strip()
    memory = await open_shared(name)
    owner.send_signal(signal.SIGKILL)
    await owner.wait()

    assert memory.description == b"greeting"
    assert memory.array[:5].tobytes() == b"hello"
    assert name not in Path("/proc/net/unix").read_text()
    with pytest.raises(ConnectionRefusedError):
        await open_shared(name)

    view = memory.array[:5]
    memory.close()
    assert np.array_equal(view, np.frombuffer(b"hello", dtype=np.uint8))

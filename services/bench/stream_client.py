"""A process full of clients: `python -m services.bench.stream_client`.

A job comes as a line of JSON on stdin. It says `ready` when it is connected, opens its
streams at the line `go`, and at the end of stdin cancels what is left, and says as a line
of JSON what came of each: seconds on this machine's monotonic clock, and tokens.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import uvloop

from firsttoken.worker.v1 import worker_pb2
from services.bench.grpc_stream import NO_LIMIT, Call, connect
from services.runtime.garbage import spare_what_is_there

# Of each message with tokens: when it came, and how many.
Arrivals: TypeAlias = list[tuple[float, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`request`: as it is sent, in base64. `take_bytes_per_s`: what a client reads of each
    answer; 0: all at once."""

    address: str
    path: str
    request: str
    num_connections: int
    num_streams: int
    take_bytes_per_s: int = 0


class ClientProcess:
    """An async context manager; entered, it is connected."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def __aenter__(self) -> ClientProcess:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.bench.stream_client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 28,
        )
        self._tell(json.dumps(asdict(self._job)))
        await self._hear()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def go(self) -> None:
        self._tell("go")

    async def end(self) -> list[Arrivals]:
        """Of each stream."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = json.loads(await self._hear())
        await self._process.wait()
        return [[(at_s, count) for at_s, count in stream] for stream in found]

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _hear(self) -> bytes:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of clients has died")
        return line


async def _serve(job: Job, stdin: asyncio.StreamReader) -> list[Arrivals]:
    window_bytes = job.take_bytes_per_s or NO_LIMIT
    connections = [
        await connect(job.address, window_bytes=window_bytes) for _ in range(job.num_connections)
    ]
    spare_what_is_there()
    print("ready", flush=True)
    await stdin.readline()
    request = base64.b64decode(job.request)
    places = [connections[number % len(connections)] for number in range(job.num_streams)]
    calls = [place.call(job.path, request) for place in places]
    ending = asyncio.create_task(stdin.read())
    while job.take_bytes_per_s and not ending.done():
        await asyncio.wait({ending}, timeout=1.0)
        for place, call in zip(places, calls, strict=True):
            place.take(call, job.take_bytes_per_s)
    await ending
    for place, call in zip(places, calls, strict=True):
        place.cancel(call)
    for connection in connections:
        connection.close()
    return [arrivals(call) for call in calls]


def arrivals(call: Call) -> Arrivals:
    found = []
    for at_s, data in call.messages():
        count = len(worker_pb2.GenerateResponse.FromString(data).chunk.token_ids) // 4
        if count:
            found.append((at_s, count))
    return found


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol: Any = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    return reader


async def _main() -> None:
    stdin = await _open_stdin()
    found: Sequence[Arrivals] = await _serve(Job(**json.loads(await stdin.readline())), stdin)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    uvloop.run(_main())

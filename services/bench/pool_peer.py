"""A peer of the pools' benchmark: `python -m services.bench.pool_peer` prints its address.

Echo answers at once, Swallow reads a message a second, Bulk sends as fast as it is read.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import uvloop

from services.runtime.channels import message_options
from services.runtime.startup import StartupError

SERVICE = "firsttoken.bench.Pool"
ECHO, SWALLOW, BULK = (f"/{SERVICE}/{name}" for name in ("Echo", "Swallow", "Bulk"))
BULK_BYTES = 1 << 20


class Peer(NamedTuple):
    pid: int
    address: str


@asynccontextmanager
async def run_peer() -> AsyncIterator[Peer]:
    """A process of its own. It ends with ours, however that ends."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.bench.pool_peer"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        address = (await child.stdout.readline()).decode().strip()
        if not address:
            raise StartupError("a peer of the benchmark has not started")
        yield Peer(child.pid, address)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _swallow(requests: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in requests:
        await asyncio.sleep(1)
    return b""


async def _bulk(request: bytes, context: Any) -> AsyncIterator[bytes]:
    while True:
        yield bytes(BULK_BYTES)


async def _main() -> None:
    server = grpc.aio.server(options=message_options())
    handlers: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Swallow": grpc.stream_unary_rpc_method_handler(_swallow),
        "Bulk": grpc.unary_stream_rpc_method_handler(_bulk),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until its end
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(_main())

"""What the tests with real nodes share."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from firsttoken.client import GenerationStream, MeshClient, Piece
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from router.fleet import Worker
from router.node import RouterNode
from services.control.node import ControlNode
from services.core import config
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.tokenizer.node import TokenizerNode
from tests.runtime.waiting import eventually


def simulated(
    *,
    router: Mapping[str, Any] | None = None,
    timing: Mapping[str, Any] | None = None,
    **worker: Any,
) -> MeshConfig:
    """A mesh whose engines take no time, unless told to."""
    instant = {"prefill_tokens_per_s": 1e9, "decode_step_ms": 0.0, "decode_step_ms_per_seq": 0.0}
    engine = {"engine": "simulated", "simulated": {**instant, **(timing or {})}, **worker}
    return config.parse({"router": dict(router or {}), "worker": engine})


def endless(client: MeshClient, prompt: str = "On and on", **options: Any) -> GenerationStream:
    """A request that keeps its worker until it is cancelled, given an engine that takes time."""
    return client.generate(prompt, max_tokens=2000, ignore_eos=True, **options)


async def configure(control_address: str, changes: Mapping[str, str]) -> int:
    """`changes`: dotted key to JSON. Returns the generation that has them."""
    async with open_channel(control_address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        response = await stub.SetConfig(control_pb2.SetConfigRequest(changes=changes))
        return response.configuration.generation


async def idle(*routers: RouterNode) -> None:
    """Wait until nothing runs, and see that nothing is still held."""
    dispatchers = [router.mesh.dispatcher for router in routers]
    await eventually(
        lambda: not any(each.num_in_flight or each.num_pending for each in dispatchers),
        "the routers to be idle",
    )
    for dispatcher in dispatchers:
        dispatcher.check_idle()


class Served(NamedTuple):
    process: Process
    address: str

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        self.process.send_signal(signal_number)

    def pid_of(self, part: str) -> int:
        """Of a worker: its "front", or its engine "core"."""
        return self.process.pid if part == "front" else self.children()[0]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]


@asynccontextmanager
async def run_process(module: str, control: str, *options: str) -> AsyncIterator[Served]:
    """`python -m module`, serving; killed in the end, whatever it is doing."""
    read_end, write_end = os.pipe()
    arguments = ["-m", module, "--control", control, "--ready-fd", str(write_end), *options]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, pass_fds=[write_end])
    os.close(write_end)
    try:
        with os.fdopen(read_end) as ready:
            address = (await asyncio.to_thread(ready.readline)).strip()
        assert address, f"{module} did not start"
        yield Served(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Mesh(NamedTuple):
    """A mesh whose other members the test adds, as nodes or as processes."""

    control: str
    router: RouterNode
    client: MeshClient

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.router.mesh.dispatcher.workers

    def at_work(self) -> list[str]:
        """The addresses of workers that have requests."""
        return [worker.announced.address for worker in self.workers if worker.in_flight]

    async def ready(self, num_workers: int) -> None:
        await eventually(lambda: sum(worker.ready for worker in self.workers) == num_workers)
        await eventually(lambda: self.router.mesh.roster.tokenizers)

    async def complete(self) -> None:
        await self.client.complete("hi", max_tokens=2)


@asynccontextmanager
async def run_mesh(config: MeshConfig, *, direct: bool = False) -> AsyncIterator[Mesh]:
    """`direct`: whether the client goes past the router."""
    async with (
        ControlNode(config=config) as control,
        RouterNode(control=control.address) as router,
        MeshClient(router.address, direct=direct) as client,
    ):
        yield Mesh(control.address, router, client)
        await idle(router)


@asynccontextmanager
async def run_workers(
    mesh: Mesh, num_workers: int, *options: str
) -> AsyncIterator[dict[str, Served]]:
    """By address. The router has spoken to each of them already."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(TokenizerNode(control=mesh.control))
        started = await asyncio.gather(
            *(
                stack.enter_async_context(run_process("worker", mesh.control, *options))
                for _ in range(num_workers)
            )
        )
        await mesh.ready(num_workers)
        for _ in started:
            await mesh.complete()
        yield {each.address: each for each in started}


async def collect(stream: GenerationStream, pieces: list[Piece]) -> None:
    async for piece in stream:
        pieces.append(piece)

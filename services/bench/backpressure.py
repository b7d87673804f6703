"""What a prefill worker's memory does while a decode worker stands still.

The engine is simulated; its KV is real bytes, 8 MiB a prompt. Requests wait at the
router, at the decode worker and at the prefill worker, which computes what the decode
worker had room for and can then get rid of nothing more.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firsttoken.client import Answer, MeshClient
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.bench.processes import family, list_members, stopped, until
from services.bench.settings import configure
from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel

# For a mesh with one worker that answers and one that prefills.
CONFIG: MeshConfig = parse(
    {
        "worker": {
            "engine": "simulated",
            "num_slots": 8,
            "handoff_min_tokens": 1,
            "handoff_timeout_ms": 120_000,
            "simulated": {
                "prefill_tokens_per_s": 20_000,
                "kv_bytes_per_token": 16 << 10,
                "num_blocks": 128,
            },
        }
    }
)
NUM_WORKERS = NUM_PREFILL_WORKERS = 1

TRANSPORTS = ("shared_memory", "grpc")
PROMPT_TOKENS = 512
NUM_WARM_UP = 32
SAMPLE_S = 0.1
START_TIMEOUT_S = 60.0
MIB = 1 << 20


class Memory(NamedTuple):
    """Of a worker, front and core together, in bytes."""

    private: int
    # KV blocks: both have them mapped.
    shared: int

    @property
    def total(self) -> int:
        return self.private + self.shared


async def measure(
    client: MeshClient, control: str, *, num_requests: int = 200, stopped_s: float = 8.0
) -> dict[str, Any]:
    """For each transport: before, and the most while the decode worker stood still.

    `stopped_s`: less than what ends a silent connection, which would free everything.
    """
    rows = []
    for transport in TRANSPORTS:
        await configure(control, {"worker.handoff_transport": transport})
        rows.append(await _measure(client, control, transport, num_requests, stopped_s))
    return {
        "benchmark": "backpressure",
        "engine": CONFIG.worker.engine,
        "requests": num_requests,
        "kv_mib_of_all": num_requests * PROMPT_TOKENS * (16 << 10) / MIB,
        "transports": rows,
    }


async def _measure(
    client: MeshClient, control: str, transport: str, num_requests: int, stopped_s: float
) -> dict[str, Any]:
    prefill, decode = await _find(control)
    victims, watched = family(decode, control), family(prefill, control)
    await asyncio.gather(*(_ask(client) for _ in range(NUM_WARM_UP)))
    before = _memory(watched)
    asked = [asyncio.create_task(_ask(client)) for _ in range(num_requests)]
    try:
        await until(lambda: _prefills(prefill.address), START_TIMEOUT_S)
        with stopped(victims):
            peak = await _watch(watched, stopped_s)
            load = await _load(prefill.address)
        answers = await asyncio.gather(*asked)
    finally:
        for task in asked:
            task.cancel()
    return {
        "transport": transport,
        "before_mib": before.total / MIB,
        "peak_mib": peak.total / MIB,
        "growth_mib": (peak.total - before.total) / MIB,
        "still_running": load.num_running,
        "answered": len(answers),
        "handed_off": sum(answer.kv_path.handed_off for answer in answers),
    }


async def _ask(client: MeshClient) -> Answer:
    prompt = np.random.default_rng(time.monotonic_ns()).integers(100, 1000, PROMPT_TOKENS)
    return await client.complete(prompt.tolist(), max_tokens=4, ignore_eos=True)


async def _find(control: str) -> tuple[control_pb2.Member, control_pb2.Member]:
    """The prefill worker and the decode worker."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        workers = await list_members(stub, control_pb2.MEMBER_ROLE_WORKER)
    by_role = {member.worker.role: member for member in workers}
    return by_role[control_pb2.WORKER_ROLE_PREFILL], by_role[control_pb2.WORKER_ROLE_DECODE]


async def _prefills(address: str) -> bool:
    return (await _load(address)).num_running > 0


async def _load(address: str) -> worker_pb2.Load:
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.Watch(worker_pb2.WatchRequest(load_only=True))
        first = await anext(aiter(call))
        call.cancel()
    return first.snapshot.load


async def _watch(pids: Sequence[int], duration_s: float) -> Memory:
    """The most in this time."""
    end_s = time.monotonic() + duration_s
    most = _memory(pids)
    while time.monotonic() < end_s:
        await asyncio.sleep(SAMPLE_S)
        most = max(most, _memory(pids), key=lambda memory: memory.total)
    return most


def _memory(pids: Sequence[int]) -> Memory:
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    private = sum(_bytes(text, "RssAnon") + _bytes(text, "RssFile") for text in texts)
    return Memory(private, max(_bytes(text, "RssShmem") for text in texts))


def _bytes(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0

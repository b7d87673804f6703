"""Many streams through one worker: do its tokens come as evenly as its engine makes them?

The engine is simulated. Clients call the worker itself, or the router in front of it, from
processes of their own, and do as little as they can.
"""

from __future__ import annotations

import asyncio
import base64
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from services.bench.processes import cpu_s, family, list_members
from services.bench.stream_client import Arrivals, ClientProcess, Job
from services.bench.worker_load import Engine, LoadWatch, watch_load
from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel

STEP_MS = 20.0
MOST_STREAMS = 256
CONFIG: MeshConfig = parse(
    {
        "router": {"max_queue": 4096},
        "worker": {
            "engine": "simulated",
            "num_slots": MOST_STREAMS,
            "max_context_tokens": 1 << 16,
            "simulated": {
                "prefill_tokens_per_s": 1e6,
                "decode_step_ms": STEP_MS,
                "decode_step_ms_per_seq": 0,
                "num_blocks": 1 << 19,
                "kv_bytes_per_token": 8,
            },
        },
    }
)
PROMPT_TOKENS = 16
# As many as nobody waits for.
ANSWER_TOKENS = 1 << 15
NUM_PROCESSES, CONNECTIONS = 2, 4
SETTLE_S = 1.5
# Beside so many others is one that reads this much a second.
NUM_BESIDE, SLOW_BYTES_PER_S = 63, 1
WORKER_PATH = "/firsttoken.worker.v1.WorkerService/Generate"
ROUTER_PATH = "/firsttoken.router.v1.InferenceService/Generate"


class Place(NamedTuple):
    """Where the streams are asked for. `pids`: of the mesh's processes, by name."""

    address: str
    path: str
    request: bytes
    pids: Mapping[str, int]
    watch: LoadWatch


class Window(NamedTuple):
    """Between two looks, on this machine's monotonic clock."""

    began_s: float
    ended_s: float
    engine: Engine
    cpu_s: Mapping[str, float]

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


@asynccontextmanager
async def place(control: str, router: str, *, through: str) -> AsyncIterator[Place]:
    """In a mesh of CONFIG with one worker. `through`: "worker" or "router"."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        [worker] = await list_members(stub, control_pb2.MEMBER_ROLE_WORKER)
        [routing] = await list_members(stub, control_pb2.MEMBER_ROLE_ROUTER)
    front, core = family(worker, control)
    pids = {"worker front": front, "engine core": core}
    async with watch_load(worker.address) as watch:
        if through == "worker":
            yield Place(worker.address, WORKER_PATH, _request(worker_pb2), pids, watch)
        else:
            pids["router"] = routing.pid
            yield Place(router, ROUTER_PATH, _request(inference_pb2), pids, watch)


async def measure(at: Place, *, num_streams: Sequence[int], window_s: float) -> dict[str, Any]:
    rows = [await _measure(at, count, window_s) for count in num_streams]
    return {"cores": os.cpu_count(), "step_ms": STEP_MS, "loads": rows}


async def measure_slow(at: Place, *, window_s: float, num_turns: int) -> dict[str, Any]:
    """By turns without and with a client that hardly reads, the others going on all the while.

    Ratios are medians over the turns.
    """
    pairs: list[tuple[Window, Window]] = []
    slow_tokens = 0
    async with _clients(at, NUM_BESIDE) as clients:
        for _ in range(num_turns):
            async with ClientProcess(_job(at, 1, 1, take_bytes_per_s=SLOW_BYTES_PER_S)) as slow:
                without = await _look(at, clients, window_s)
                slow.go()
                await asyncio.sleep(SETTLE_S)
                pairs.append((without, await _look(at, clients, window_s)))
                slow_tokens += sum(count for _, count in (await slow.end())[0])
        streams = await _end(clients)
    turns = [
        (_distribution(streams, [without]), _distribution(streams, [beside]))
        for without, beside in pairs
    ]
    return {
        "streams": NUM_BESIDE,
        "slow_client_tokens": slow_tokens,
        "without": _distribution(streams, [without for without, _ in pairs]),
        "beside_a_slow_client": _distribution(streams, [beside for _, beside in pairs]),
        **{
            f"ratio_{name}": statistics.median(
                beside[name] / alone[name] for alone, beside in turns
            )
            for name in ("tpot_p99_ms", "gap_p99_ms")
        },
    }


async def _measure(at: Place, count: int, window_s: float) -> dict[str, Any]:
    async with _clients(at, count) as clients:
        window = await _look(at, clients, window_s)
        streams = await _end(clients)
    found = _distribution(streams, [window])
    num_tokens = found.pop("tokens")
    return {
        "streams": count,
        "wanted_tokens_per_s": count * 1e3 / STEP_MS,
        "tokens_per_s": num_tokens / window.duration_s,
        **found,
        "tpot_p99_to_step": found["tpot_p99_ms"] / STEP_MS,
        **window.engine.describe(),
        "cpu_us_per_token": {
            name: spent_s / num_tokens * 1e6 for name, spent_s in window.cpu_s.items()
        },
        "cores_busy": sum(window.cpu_s.values()) / window.duration_s,
    }


@asynccontextmanager
async def _clients(at: Place, count: int) -> AsyncIterator[list[ClientProcess]]:
    """Streams that have begun, and settled."""
    async with AsyncExitStack() as stack:
        shares = [len(range(number, count, NUM_PROCESSES)) for number in range(NUM_PROCESSES)]
        clients = [
            await stack.enter_async_context(ClientProcess(_job(at, share, CONNECTIONS)))
            for share in shares
            if share
        ]
        for client in clients:
            client.go()
        async with asyncio.timeout(60):
            while (await at.watch.fresh()).num_running < count:
                pass
        await asyncio.sleep(SETTLE_S)
        yield clients


async def _look(at: Place, clients: Sequence[ClientProcess], window_s: float) -> Window:
    pids = {**at.pids, **{f"clients {n}": each.pid for n, each in enumerate(clients, start=1)}}
    before = await at.watch.fresh()
    spent_s, began_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    await asyncio.sleep(window_s)
    ended_s, cpu = time.monotonic(), {n: cpu_s(pid) - spent_s[n] for n, pid in pids.items()}
    return Window(began_s, ended_s, Engine.between(before, await at.watch.fresh()), cpu)


async def _end(clients: Sequence[ClientProcess]) -> list[Arrivals]:
    return [stream for each in clients for stream in await each.end()]


def _distribution(streams: Sequence[Arrivals], windows: Sequence[Window]) -> dict[str, Any]:
    """TPOT: of each stream its mean. Gaps: between messages, of all streams."""
    tpots_s: list[float] = []
    gaps_s: list[float] = []
    num_tokens = num_messages = 0
    for window in windows:
        for stream in streams:
            heard = [each for each in stream if window.began_s <= each[0] < window.ended_s]
            num_messages += len(heard)
            num_tokens += sum(count for _, count in heard)
            times_s = [at_s for at_s, _ in heard]
            gaps_s += np.diff(times_s).tolist()
            behind_first = sum(count for _, count in heard[1:])
            # A stream that stands still has a TPOT too.
            took_s = times_s[-1] - times_s[0] if behind_first else window.duration_s
            tpots_s.append(took_s / max(1, behind_first))
    return {
        "tokens": num_tokens,
        "tokens_per_message": num_tokens / max(1, num_messages),
        "tpot_p50_ms": statistics.median(tpots_s) * 1e3,
        "tpot_p99_ms": _percentile(tpots_s, 99) * 1e3,
        "gap_p50_ms": _percentile(gaps_s, 50) * 1e3,
        "gap_p99_ms": _percentile(gaps_s, 99) * 1e3,
        "longest_gap_ms": max(gaps_s, default=0.0) * 1e3,
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def _job(at: Place, streams: int, connections: int, *, take_bytes_per_s: int = 0) -> Job:
    return Job(
        address=at.address,
        path=at.path,
        request=base64.b64encode(at.request).decode(),
        num_connections=connections,
        num_streams=streams,
        take_bytes_per_s=take_bytes_per_s,
    )


def _request(protos: Any) -> bytes:
    """No prefix keys: nothing is kept of it."""
    sampling = common_pb2.SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    ids = np.arange(1000, 1000 + PROMPT_TOKENS, dtype="<u4").tobytes()
    request: bytes = protos.GenerateRequest(token_ids=ids, sampling=sampling).SerializeToString()
    return request

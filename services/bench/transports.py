"""How fast KV goes from engine to engine, by each transport, against what the machine can do.

The time is that of a request: from the end of the prompt's last step at one worker to the
first decode step at the other, with nothing sent before. So it includes the engines' own
export and import, checksums and credit. Engines are simulated, and move their KV as fast
as memory allows. Beside it, in turn: the same bytes through a plain TCP socket between
two processes, copied within one, and out of an engine and into it again within one. What
a hand-off takes beyond the last is its transport's part.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from firsttoken.client import MeshClient
from services.bench.in_process import Reference
from services.bench.settings import configure
from services.core.config import parse
from services.core.settings import MeshConfig
from services.core.tokens import TokenArray
from services.runtime.allocator import keep_freed_memory
from services.runtime.startup import StartupError
from worker.engines import open_engine

TRANSPORTS = ("shared_memory", "grpc")
BLOCK_TOKENS = 64
NUM_BLOCKS = 64
PROMPT_TOKENS = NUM_BLOCKS * BLOCK_TOKENS
# For a mesh with one worker that answers and one that prefills. A block has 1 MiB.
CONFIG: MeshConfig = parse(
    {
        "mesh": {"block_tokens": BLOCK_TOKENS},
        "worker": {
            "engine": "simulated",
            "num_slots": 2,
            "max_context_tokens": PROMPT_TOKENS + BLOCK_TOKENS,
            "max_batch_tokens": PROMPT_TOKENS,
            "handoff_min_tokens": 1,
            "handoff_export_blocks": 0,
            "simulated": {
                "prefill_tokens_per_s": 1e9,
                "decode_step_ms": 0,
                "num_blocks": 2 * NUM_BLOCKS + 2,
                "kv_bytes_per_token": 16 << 10,
                "transfer_gb_per_s": 1e6,
            },
        },
    }
)
NUM_WORKERS = NUM_PREFILL_WORKERS = 1


async def measure(
    client: MeshClient, control: str, *, config: MeshConfig = CONFIG, num_rounds: int = 9
) -> dict[str, Any]:
    """Medians over rounds that alternate between all that is compared. `config`: the mesh's."""
    keep_freed_memory()  # as the workers do
    block_bytes = BLOCK_TOKENS * config.worker.simulated.kv_bytes_per_token
    times_s: dict[str, list[float]] = defaultdict(list)
    engine = await asyncio.to_thread(open_engine, config, cores_shared_by=1)
    reference = await asyncio.to_thread(Reference, engine, _prompt(0))
    copy = _memory_copy(block_bytes)
    async with _raw_socket(NUM_BLOCKS * block_bytes) as receive:
        for round_number in range(num_rounds + 1):
            took_s = {
                "memcpy": await asyncio.to_thread(copy),
                "tcp": await asyncio.to_thread(receive),
                "in_process": await asyncio.to_thread(reference.move) / 1e3,
            }
            for transport in TRANSPORTS:
                await configure(control, {"worker.handoff_transport": transport})
                took_s[transport] = await _hand_off(client, round_number)
            if round_number:  # the first warms up
                for name, seconds in took_s.items():
                    times_s[name].append(seconds)
    engine.close()
    medians_s = {name: statistics.median(each) for name, each in times_s.items()}
    return {
        "benchmark": "transports",
        "engine": engine.info.name,
        "rounds": num_rounds,
        "block_bytes": block_bytes,
        "blocks": NUM_BLOCKS,
        **_compare(medians_s),
    }


def _compare(median_s: dict[str, float]) -> dict[str, Any]:
    return {
        "median_ms": {name: seconds * 1e3 for name, seconds in median_s.items()},
        "shared_memory_end_to_end_of_memcpy": median_s["memcpy"] / median_s["shared_memory"],
        "grpc_end_to_end_of_tcp": median_s["tcp"] / median_s["grpc"],
        # Of what it takes beyond the engine's own export and import.
        "grpc_of_tcp": median_s["tcp"] / (median_s["grpc"] - median_s["in_process"]),
    }


def _prompt(round_number: int) -> TokenArray:
    random = np.random.default_rng(round_number)
    return random.integers(100, 1000, PROMPT_TOKENS).astype(np.uint32)


async def _hand_off(client: MeshClient, round_number: int) -> float:
    """Seconds."""
    prompt = _prompt(round_number).tolist()
    salt = f"bench transports {time.monotonic_ns()}"
    answer = await client.complete(prompt, max_tokens=3, ignore_eos=True, cache_salt=salt)
    path = answer.kv_path
    if not path.handoff_gap_ms:
        raise StartupError(f"the prompt was not handed off: {path.reason}")
    return path.handoff_gap_ms / 1e3


def _memory_copy(block_bytes: int) -> Callable[[], float]:
    """Block by block, as KV lies; seconds."""
    source, target = np.full((2, NUM_BLOCKS, block_bytes), 1, np.uint8)

    def copy() -> float:
        began_s = time.monotonic()
        for block, place in zip(source, target, strict=True):
            np.copyto(place, block)
        return time.monotonic() - began_s

    return copy


@asynccontextmanager
async def _raw_socket(num_bytes: int) -> AsyncIterator[Callable[[], float]]:
    """Receive `num_bytes` from another process; seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.bench.raw_sender", str(port), str(num_bytes)
        )
        connection, _ = await asyncio.to_thread(listener.accept)
        memory = np.full(num_bytes, 1, np.uint8)

        def receive() -> float:
            began_s = time.monotonic()
            connection.sendall(b"\0")
            view = memory.data
            while view:
                view = view[connection.recv_into(view) :]
            return time.monotonic() - began_s

        with connection:
            yield receive
        await sender.wait()

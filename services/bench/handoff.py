"""What a hand-off costs: from the prompt's last step at one worker to the first decode
step at another, against an export and an import of the same blocks in one process.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from firsttoken.client import MeshClient
from services.bench.in_process import Reference
from services.bench.settings import configure
from services.bench.wake import wake_up_ms
from services.core.config import parse
from services.core.settings import MeshConfig
from services.core.tokens import TokenArray
from services.runtime.startup import StartupError
from worker.engines import open_engine
from worker.engines.contract import Engine

# For a mesh with one worker that answers and one that prefills.
CONFIG: MeshConfig = parse({"worker": {"num_slots": 4, "handoff_min_tokens": 1}})
NUM_WORKERS = NUM_PREFILL_WORKERS = 1

PROMPT_TOKENS = (256, 800)
TRANSPORTS = ("shared_memory", "grpc")
# Blocks that leave together while the prompt is computed; 0: all at its end.
EXPORTS = (1, 0)


class Way(NamedTuple):
    prompt_tokens: int
    transport: str
    export_blocks: int


class Figures(NamedTuple):
    """Of one prompt, in milliseconds."""

    gap_ms: float
    ttft_ms: float


async def measure(
    client: MeshClient,
    control: str,
    *,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    num_rounds: int = 5,
) -> dict[str, Any]:
    """Medians over rounds that alternate between all that is compared."""
    handed_off: dict[Way, list[Figures]] = defaultdict(list)
    in_process_ms: dict[int, list[float]] = defaultdict(list)
    again_ms: dict[int, list[float]] = defaultdict(list)
    # As many threads as a worker of the mesh has.
    engine = await asyncio.to_thread(
        open_engine, CONFIG, cores_shared_by=NUM_WORKERS + NUM_PREFILL_WORKERS
    )
    try:
        for num_tokens in prompt_tokens:
            reference = await asyncio.to_thread(Reference, engine, _prompt(num_tokens))
            ways = [Way(num_tokens, *rest) for rest in itertools.product(TRANSPORTS, EXPORTS)]
            for round_number, way in itertools.product(range(num_rounds + 1), ways):
                figures = await _hand_off(client, control, way)
                took_ms = await asyncio.to_thread(reference.move)
                took_again_ms = await asyncio.to_thread(reference.move_again)
                if round_number:  # the first warms up
                    handed_off[way].append(figures)
                    in_process_ms[num_tokens].append(took_ms)
                    again_ms[num_tokens].append(took_again_ms)
    finally:
        engine.close()
    return {
        "benchmark": "handoff",
        "rounds": num_rounds,
        **_describe(engine),
        "wake_up_ms": await asyncio.to_thread(wake_up_ms),
        "handoffs": [
            _row(way, figures, in_process_ms[way.prompt_tokens], again_ms[way.prompt_tokens])
            for way, figures in handed_off.items()
        ],
    }


def _describe(engine: Engine) -> dict[str, Any]:
    return {"engine": engine.info.name, "block_bytes": engine.info.block_bytes}


def _prompt(num_tokens: int) -> TokenArray:
    return np.random.default_rng(num_tokens).integers(100, 40_000, num_tokens).astype(np.uint32)


async def _hand_off(client: MeshClient, control: str, way: Way) -> Figures:
    changes = {
        "worker.handoff_transport": way.transport,
        "worker.handoff_export_blocks": way.export_blocks,
    }
    await configure(control, changes)
    # The salt keeps it from what lies in the caches.
    salt = f"bench handoff {time.monotonic_ns()}"
    prompt = _prompt(way.prompt_tokens).tolist()
    answer = await client.complete(prompt, max_tokens=3, ignore_eos=True, cache_salt=salt)
    path = answer.kv_path
    if not path.handoff_gap_ms:
        raise StartupError(f"the prompt was not handed off: {path.reason}")
    return Figures(path.handoff_gap_ms, answer.ttft_ms)


def _row(
    way: Way, figures: list[Figures], in_process_ms: list[float], again_ms: list[float]
) -> dict[str, Any]:
    gaps_ms = [each.gap_ms for each in figures]
    gap_ms, alone_ms = statistics.median(gaps_ms), statistics.median(in_process_ms)
    return {
        **way._asdict(),
        "gap_ms": gap_ms,
        "in_process_ms": alone_ms,
        # The same once more, with warm caches: what no request finds.
        "in_process_again_ms": statistics.median(again_ms),
        "ratio": gap_ms / alone_ms,
        # With the least that other processes took away.
        "ratio_of_best": min(gaps_ms) / min(in_process_ms),
        "ttft_ms": statistics.median(each.ttft_ms for each in figures),
    }

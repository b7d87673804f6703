"""firsttoken bench kv: what KV that travels costs and saves, part by part.

Each part has a mesh or a server of its own, with the real model unless it says
otherwise, and compares within one run: its ratios hold across machines.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from firsttoken.client import MeshClient
from services.bench import (
    backpressure,
    eviction,
    handoff,
    loading,
    migration,
    redis,
    restart,
    transports,
    workload_traces,
)
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.cli.restarts import RestartPolicy
from services.core.settings import MeshConfig
from services.runtime.startup import StartupError

Measure: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]

TRACES = [workload_traces.FOLDER / workload_traces.TRACES[name] for name in ("agents", "mooncake")]
# Processes are killed as often as it takes.
ALWAYS_RESTART = partial(RestartPolicy, max_crashes=10_000, max_delay_s=0.25)


class Part(NamedTuple):
    help: str
    measure: Measure


async def _on_mesh(
    measure: Callable[[MeshClient, str], Coroutine[Any, Any, dict[str, Any]]],
    config: MeshConfig,
    *,
    num_workers: int = 2,
    num_prefill_workers: int = 0,
) -> dict[str, Any]:
    """`measure(client, control's address)` on a mesh whose processes it may kill."""
    async with (
        run_quiet_mesh(
            config,
            num_workers=num_workers,
            num_prefill_workers=num_prefill_workers,
            restarts=ALWAYS_RESTART,
        ) as mesh,
        MeshClient(mesh.router) as client,
    ):
        return await mesh.run_beside(measure(client, mesh.control))


async def _eviction() -> dict[str, Any]:
    return await asyncio.to_thread(eviction.measure_traces, TRACES)


PARTS = {
    "handoff": Part(
        "from the last prompt step at one worker to the first decode step at another",
        partial(_on_mesh, handoff.measure, handoff.CONFIG, num_workers=1, num_prefill_workers=1),
    ),
    "transports": Part(
        "KV from engine to engine, against a TCP socket and a copy in memory (simulated engine)",
        partial(
            _on_mesh, transports.measure, transports.CONFIG, num_workers=1, num_prefill_workers=1
        ),
    ),
    "backpressure": Part(
        "a prefill worker's memory while a decode worker stands still (simulated engine)",
        partial(
            _on_mesh,
            backpressure.measure,
            backpressure.CONFIG,
            num_workers=1,
            num_prefill_workers=1,
        ),
    ),
    "loading": Part("load or recompute beside an oracle, on a throttled Redis", loading.measure),
    "restart": Part(
        "what Redis gives back when all workers and the KV store died",
        partial(_on_mesh, restart.measure, MeshConfig()),
    ),
    "migration": Part(
        "20 answers whose worker is killed under them",
        partial(_on_mesh, migration.measure, migration.CONFIG, num_workers=migration.NUM_WORKERS),
    ),
    "redis": Part("ways to Redis: connection pools, or one multiplexed connection", redis.measure),
    "eviction": Part("hit rate by size of L1 on real traces (minutes)", _eviction),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part",
        action="append",
        choices=tuple(PARTS),
        dest="parts",
        help="measure this alone; may be repeated (default: all): "
        + "; ".join(f"{name}: {part.help}" for name, part in PARTS.items()),
    )


async def measure(names: Sequence[str] | None) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    document: dict[str, Any] = {"benchmark": "kv"}
    for name in names or PARTS:
        print(f"{name}: {PARTS[name].help} …", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        try:
            figures = await PARTS[name].measure()
        except StartupError as error:  # this machine lacks something
            raise Failure(f"{name}: {error}", exit_status=CANNOT_START) from error
        figures.pop("benchmark", None)
        document[name] = {**figures, "took_s": round(time.monotonic() - began_s, 1)}
    return document


def show(document: dict[str, Any]) -> None:
    for name in document.keys() & PARTS.keys():
        print(f"{name}: {PARTS[name].help}", *show_figures(document[name]), "", sep="\n")

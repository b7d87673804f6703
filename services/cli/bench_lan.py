"""firsttoken bench lan: calls of unequal length over three unequal machines.

The machines are workers of this one, with simulated engines of different speeds; nothing is
between them but loopback. All calls come at once, and the mesh knows nothing of their lengths
but max_tokens, which here is the length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from firsttoken.client import MeshClient
from services.bench import lan
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.cli.process import Process, Service

MAX_SEEDS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=_seeds, default=6, metavar="N", help="sets of calls (default 6)"
    )


async def measure(*, seeds: int) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    machines = []
    for token_ms in lan.TOKEN_MS:
        print(f"a machine of {token_ms:g} ms a token …", file=sys.stderr, flush=True)
        async with _client([token_ms], num_slots=1) as client:
            machines.append(await lan.measure_machine(client))
    by_slots = {}
    for num_slots in (1, 8):
        print(f"all of them, {num_slots} at once each …", file=sys.stderr, flush=True)
        async with _client(lan.TOKEN_MS, num_slots=num_slots) as client:
            rounds = []
            for seed in range(seeds):
                lengths = lan.lengths_of(seed)
                rounds.append((lengths, await lan.run_calls(client, lengths, seed=seed)))
        by_slots[f"slots_{num_slots}"] = lan.figures_of(machines, rounds)
    return {"benchmark": "lan", "engine": "simulated", "network": "loopback", **by_slots}


def show(document: dict[str, Any]) -> None:
    print(*show_figures(document, ""), sep="\n")


@contextlib.asynccontextmanager
async def _client(speeds_ms: Sequence[float], *, num_slots: int) -> AsyncIterator[MeshClient]:
    """Of a mesh with these machines, each of which has been called."""
    mesh = run_quiet_mesh(lan.config_of(num_slots), num_workers=0, with_kvstore=False)
    async with mesh as running, contextlib.AsyncExitStack() as stack:
        lifeline, lifeline_write = os.pipe()
        stack.callback(os.close, lifeline_write)
        stack.callback(os.close, lifeline)
        for speed_ms in speeds_ms:
            own = json.dumps(lan.own_settings(speed_ms))
            process = await Process.start(
                Service(
                    name="worker",
                    module="worker",
                    arguments=("--control", running.control, "--settings", own),
                ),
                lifeline_fd=lifeline,
                on_line=lambda line: None,
            )
            stack.push_async_callback(process.stop)
            await process.ready()
        async with MeshClient(running.router) as client:
            for seed in range(900, 904):
                lengths = [lan.ANSWER_TOKENS[0]] * 2 * len(speeds_ms)
                await running.run_beside(lan.run_calls(client, lengths, seed=seed))
            # What was told of the last ones has come.
            await asyncio.sleep(0.3)
            yield client


def _seeds(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_SEEDS:
        raise argparse.ArgumentTypeError(f"must be in [1, {MAX_SEEDS}]")
    return value

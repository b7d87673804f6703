"""firsttoken bench pools: several connections to a peer against one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from services.bench import configured, pools, pools_at_rest, streams
from services.bench.edge import ENGINES
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.core.settings import MeshConfig
from services.runtime.startup import StartupError

# Of a mesh, about: for how many requests a figure's seconds are good.
REQUESTS_PER_S = 150


class Part(NamedTuple):
    help: str
    # With seconds of each figure, and turns.
    measure: Callable[[float, int], Awaitable[Any]]


async def _load(seconds: float, num_turns: int) -> Any:
    return await pools.measure_load(seconds=seconds, num_turns=num_turns)


async def _streams(seconds: float, num_turns: int) -> Any:
    """Medians would need a mesh for each turn: one look, twice as long."""
    rows = []
    for number in pools.IN_FLIGHT:
        for count in pools.NUM_CHANNELS:
            mesh = run_quiet_mesh(_config(count, number), num_workers=1, with_kvstore=False)
            async with (
                mesh as running,
                streams.place(running.control, running.router, through="router") as at,
            ):
                measuring = streams.measure(at, num_streams=[number], window_s=2 * seconds)
                [row] = (await running.run_beside(measuring))["loads"]
            kept = ("streams", "tokens_per_s", "tpot_p50_ms", "tpot_p99_ms", "gap_p99_ms")
            rows.append(
                {
                    "channels": count,
                    **{name: row[name] for name in kept},
                    "router_cpu_us_per_token": row["cpu_us_per_token"]["router"],
                    "worker_cpu_us_per_token": row["cpu_us_per_token"]["worker front"],
                }
            )
    return rows


def _config(num_channels: int, num_streams: int) -> MeshConfig:
    # Some calls to the worker are the router's own.
    mesh = replace(
        streams.CONFIG.mesh,
        max_channels_per_peer=num_channels,
        streams_per_channel=-(-num_streams // num_channels) + 2,
    )
    return replace(streams.CONFIG, mesh=mesh)


async def _slow_peer(seconds: float, num_turns: int) -> Any:
    return await pools.measure_slow_peer(seconds=seconds, num_turns=num_turns)


async def _sockets(seconds: float, num_turns: int) -> Any:
    places = []
    engine = ENGINES["simulated"].config
    async with AsyncExitStack() as stack:
        for name, unix_sockets in (("TCP", False), ("unix sockets", True)):
            config = replace(engine, mesh=replace(engine.mesh, unix_sockets=unix_sockets))
            mesh = run_quiet_mesh(config, num_workers=1, with_kvstore=False, with_gateway=True)
            running = await stack.enter_async_context(mesh)
            places.append(configured.Place(name, running.control, running.router, running.http))
        number = max(8, int(seconds * REQUESTS_PER_S))
        measuring = configured.compare(places, num_requests=number, num_turns=num_turns)
        return await running.run_beside(measuring)


async def _rest(seconds: float, num_turns: int) -> Any:
    return await pools_at_rest.measure()


PARTS = {
    "load": Part("calls to one peer, over 1, 2 and 4 channels", _load),
    "streams": Part("answers through the router, over 1, 2 and 4 channels", _streams),
    "slow_peer": Part("calls beside streams that stand still, or to a peer that does", _slow_peer),
    "sockets": Part("requests of meshes with and without unix sockets", _sockets),
    "rest": Part("the first calls after a rest, over channels and to Redis", _rest),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--part", action="append", choices=tuple(PARTS), dest="parts",
        help="measure this alone; may be repeated (default: all): "
        + "; ".join(f"{name}: {part.help}" for name, part in PARTS.items()))  # fmt: skip
    add("--seconds", type=_seconds, default=2.0, metavar="N", help="of each figure (default 2)")
    add("--turns", type=int, default=3, choices=range(1, 21), metavar="N",
        help="medians of so many (default 3)")  # fmt: skip


async def measure(parts: Sequence[str] | None, *, seconds: float, num_turns: int) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    document: dict[str, Any] = {"benchmark": "pools"}
    for name in parts or PARTS:
        print(f"{name}: {PARTS[name].help} …", file=sys.stderr, flush=True)
        try:
            document[name] = await PARTS[name].measure(seconds, num_turns)
        except StartupError as error:  # this machine lacks something
            raise Failure(f"{name}: {error}", exit_status=CANNOT_START) from error
    return document


def show(document: dict[str, Any]) -> None:
    print(*show_figures(document, ""), sep="\n")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 600:
        raise argparse.ArgumentTypeError("must be in [0.1, 600]")
    return value

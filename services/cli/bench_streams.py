"""firsttoken bench streams: many streams through one worker, and a client that hardly reads.

The engine is simulated: each step takes 20 ms, however many streams are in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from services.bench import streams
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError

LOADS = (64, 128, 192, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--streams", action="append", type=_streams, metavar="N",
        help=f"at once, again for more loads (default {', '.join(map(str, LOADS))})")  # fmt: skip
    add("--seconds", type=_seconds, default=8.0, metavar="N", help="of each load (default 8)")
    add("--turns", type=int, default=5, choices=range(21), metavar="N",
        help="without and with a slow client (default 5; 0: none)")  # fmt: skip
    add("--through", choices=("worker", "router"), default="worker",
        help="whom the clients call (default: the worker itself)")  # fmt: skip


async def measure(
    num_streams: Sequence[int] | None, *, window_s: float, num_turns: int, through: str
) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    mesh = run_quiet_mesh(streams.CONFIG, num_workers=1, with_kvstore=False)
    document: dict[str, Any] = {"benchmark": "streams", "engine": "simulated", "through": through}
    try:
        async with (
            mesh as running,
            streams.place(running.control, running.router, through=through) as at,
        ):
            print("many streams …", file=sys.stderr, flush=True)
            measuring = streams.measure(at, num_streams=num_streams or LOADS, window_s=window_s)
            document |= await running.run_beside(measuring)
            if num_turns:
                print("a slow client …", file=sys.stderr, flush=True)
                slow = streams.measure_slow(at, window_s=window_s / 2, num_turns=num_turns)
                document["slow_client"] = await running.run_beside(slow)
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error
    return document


def show(document: dict[str, Any]) -> None:
    print(*show_figures(document, ""), sep="\n")


def _streams(text: str) -> int:
    value = int(text)
    if not 1 <= value <= streams.MOST_STREAMS:
        raise argparse.ArgumentTypeError(f"must be in [1, {streams.MOST_STREAMS}]")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 600:
        raise argparse.ArgumentTypeError("must be in [1, 600]")
    return value

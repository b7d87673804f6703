"""firsttoken bench telemetry: what it costs to say where the time goes.

One mesh with a simulated engine, in which telling the observer is on and off by turns; and
this process, which records 1,000 requests a second by itself, to see how late its loop is.
"""

from __future__ import annotations

import argparse
from typing import Any

from services.bench import telemetry
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--turns", type=_count, default=10, metavar="N", help="pairs of turns (default 10)")
    add("--requests", type=_count, default=400, metavar="N", help="in each turn (default 400)")
    add("--seconds", type=_count, default=10, metavar="N",
        help="how long this process records requests, with and without (default 10)")  # fmt: skip


async def measure(*, num_turns: int, requests_per_turn: int, feed_s: float) -> dict[str, Any]:
    mesh = run_quiet_mesh(
        telemetry.CONFIG, num_workers=1, with_kvstore=False, with_gateway=True, with_observer=True
    )
    try:
        async with mesh as running:
            measuring = telemetry.measure(
                running.http,
                running.control,
                num_turns=num_turns,
                requests_per_turn=requests_per_turn,
                feed_s=feed_s,
            )
            document = await running.run_beside(measuring)
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error
    return {"benchmark": "telemetry", "engine": telemetry.CONFIG.worker.engine, **document}


def show(document: dict[str, Any]) -> None:
    print(*show_figures(document, ""), sep="\n")


def _count(text: str) -> int:
    value = int(text)
    if not 2 <= value <= 100_000:
        raise argparse.ArgumentTypeError("must be in [2, 100000]")
    return value

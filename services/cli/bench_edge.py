"""firsttoken bench edge: what HTTP in front of the mesh costs.

Each engine has a mesh of its own, with one worker. Figures of gRPC and HTTP are from one
run and by turns: their ratios hold across machines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from services.bench import edge
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError

MAX_SECONDS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        action="append",
        choices=tuple(edge.ENGINES),
        dest="engines",
        help="measure with this alone (default: with both); simulated: an engine that takes no"
        " time, so that all time is the service layer's",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        metavar="N",
        help="how long each load is kept up (default 4, and 12 with the real engine)",
    )


async def measure(engines: Sequence[str] | None, *, load_s: float | None) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    document: dict[str, Any] = {"benchmark": "edge"}
    for name in engines or edge.ENGINES:
        print(f"{name} engine …", file=sys.stderr, flush=True)
        engine = edge.ENGINES[name]
        mesh = run_quiet_mesh(engine.config, num_workers=1, with_kvstore=False, with_gateway=True)
        try:
            async with mesh as running:
                measuring = edge.measure(
                    running.http,
                    running.router,
                    running.control,
                    num_pairs=engine.num_pairs,
                    num_tokens=engine.num_tokens,
                    load_s=load_s or engine.load_s,
                )
                document[name] = await running.run_beside(measuring)
        except StartupError as error:  # this machine lacks something
            raise Failure(str(error), exit_status=CANNOT_START) from error
    return document


def show(document: dict[str, Any]) -> None:
    for name in edge.ENGINES:
        if name in document:
            print(f"{name} engine", *show_figures(document[name]), "", sep="\n")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be in (0, {MAX_SECONDS}]")
    return value

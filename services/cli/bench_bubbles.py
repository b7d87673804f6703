"""firsttoken bench bubbles: how long the engine waits for the mesh around it.

The engine is simulated, with steps of 5, 10 and 20 ms. Each has a mesh of its own, with one
worker: 64 streams that go on, then requests at 80 % of what the engine can do.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from services.bench import bubbles
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError

MAX_SECONDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=_seconds, default=8.0, metavar="N", help="of each load (default 8)"
    )


async def measure(*, window_s: float) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    rows = []
    for step_ms in bubbles.STEPS_MS:
        print(f"steps of {step_ms:g} ms …", file=sys.stderr, flush=True)
        mesh = run_quiet_mesh(bubbles.config_of(step_ms), num_workers=1, with_kvstore=False)
        try:
            async with mesh as running:
                measuring = bubbles.measure(
                    running.router, running.control, step_ms=step_ms, window_s=window_s
                )
                rows.append(await running.run_beside(measuring))
        except StartupError as error:  # this machine lacks something
            raise Failure(str(error), exit_status=CANNOT_START) from error
    return {"benchmark": "bubbles", "engine": "simulated", "steps": rows}


def show(document: dict[str, Any]) -> None:
    print(*show_figures(document, ""), sep="\n")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be in (0, {MAX_SECONDS}]")
    return value

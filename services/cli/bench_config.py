"""firsttoken bench config: a configuration of 10,000 keys against one of 10.

The engine is simulated and takes no time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from services.bench import configured
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError

NUM_KEYS = (10, 10_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=_count, default=400, metavar="N",
        help="of each way and turn (default 400)")  # fmt: skip
    add("--turns", type=_count, default=6, metavar="N", help="by turns (default 6)")
    add("--pushes", type=_count, default=7, metavar="N",
        help="changes of the configuration (default 7)")  # fmt: skip


async def measure(
    *, num_requests: int, num_turns: int, num_pushes: int, num_keys: Sequence[int] = NUM_KEYS
) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    places = []
    try:
        async with AsyncExitStack() as stack:
            for number in num_keys:
                print(f"a mesh with {number} keys …", file=sys.stderr, flush=True)
                config, api_key = configured.configuration(number)
                mesh = run_quiet_mesh(config, num_workers=1, with_kvstore=False, with_gateway=True)
                running = await stack.enter_async_context(mesh)
                places.append(
                    configured.Place(
                        f"{number} keys", running.control, running.router, running.http, api_key
                    )
                )
            print("requests and changes …", file=sys.stderr, flush=True)
            measuring = configured.measure(
                places, num_requests=num_requests, num_turns=num_turns, num_pushes=num_pushes
            )
            return {"benchmark": "config", **await running.run_beside(measuring)}
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error


def show(document: dict[str, Any]) -> None:
    print(*show_figures(document, ""), sep="\n")


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError("must be in [1, 1000000]")
    return value

"""firsttoken bench ladder: one optimisation after the other, and what each gives."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

from firsttoken.client import MeshError
from services.bench import ladder, ladder_live, ladder_virtual
from services.cli import ladder_tables, rpc
from services.cli.failures import BAD_REQUEST, CANNOT_START, Failure
from services.cli.mesh import LocalMesh
from services.cli.page_file import add_plot_option, check_writable
from services.cli.plans import run_quiet_mesh
from services.core.errors import InvalidArgument
from services.runtime.startup import StartupError

# Of load on each rung.
SECONDS = {"simulated": 40.0, "real": 20.0}
MAX_SECONDS = 3_600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        default="simulated",
        metavar="ENGINE",
        help="simulated: in virtual time (default); real: processes of this machine, llama.cpp",
    )
    parser.add_argument(
        "--rungs",
        default=",".join(ladder.NAMES),
        metavar="A,B,...",
        help=f"default: {','.join(ladder.NAMES)}; the baseline is always measured",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="of load on each rung (default: "
        + ", ".join(f"{engine} {seconds:g}" for engine, seconds in SECONDS.items())
        + ")",
    )
    add_plot_option(parser)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tells on stderr how far it is. Raises InvalidArgument."""
    seconds = _seconds(arguments)
    rungs = ladder.climb([name.strip() for name in arguments.rungs.split(",") if name.strip()])
    check_writable(arguments.plot)
    if arguments.engine == "real":
        document = _measure_live(rungs, seconds)
    else:
        document = ladder_virtual.measure(rungs, seconds=seconds, tell=_tell)
    if arguments.plot is not None:
        arguments.plot.write_text(ladder_tables.page(document), encoding="utf-8")
    return document


def show(document: dict[str, Any]) -> None:
    print(*ladder_tables.lines_of(document), sep="\n")


def exit_status(document: dict[str, Any]) -> int:
    """Not 0 when rungs served other requests than each other."""
    return 0 if document["equal_completions"] else BAD_REQUEST


def _measure_live(rungs: ladder.Ladder, seconds: float) -> dict[str, Any]:
    measuring = ladder_live.measure(rungs, _open_mesh, seconds=seconds, tell=_tell)
    try:
        return asyncio.run(measuring)
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error
    except MeshError as error:
        raise rpc.to_failure(error, nobody="the mesh has stopped answering") from None


def _open_mesh(
    num_workers: int, num_prefill_workers: int
) -> AbstractAsyncContextManager[LocalMesh]:
    return run_quiet_mesh(
        ladder_live.CONFIG, num_workers=num_workers, num_prefill_workers=num_prefill_workers
    )


def _seconds(arguments: argparse.Namespace) -> float:
    if arguments.engine not in SECONDS:
        raise InvalidArgument.of(
            "--engine", f"{arguments.engine[:40]!r} is no engine; there are {', '.join(SECONDS)}"
        )
    seconds = SECONDS[arguments.engine] if arguments.seconds is None else arguments.seconds
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
        raise InvalidArgument.of(
            "--seconds", f"must be above 0, and at most {MAX_SECONDS:g}; got {seconds:g}"
        )
    return seconds


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

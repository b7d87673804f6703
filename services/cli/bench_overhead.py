"""firsttoken bench overhead: what the service layer costs, beside the least that it could."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import uvloop

from firsttoken.client import MeshError
from services.bench import overhead
from services.bench.overhead_command import Foreign
from services.bench.overhead_prompts import LOADS
from services.bench.overhead_rows import NAMES
from services.cli import overhead_tables, rpc
from services.cli.failures import CANNOT_START, Failure
from services.cli.page_file import add_plot_option, check_writable
from services.cli.plans import run_quiet_mesh
from services.cli.settings import parse_assignments
from services.core.config import change
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.runtime.startup import StartupError

DEFAULTS = overhead.Plan()
MAX_REQUESTS, MAX_CONCURRENCY, MAX_RATE, MAX_SECONDS = 100_000, 1024, 10_000.0, 3_600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--rows",
        default=",".join(NAMES),
        metavar="A,B,...",
        help=f"default: {','.join(NAMES)}; {' and '.join(overhead.ALWAYS)} are always measured",
    )
    add(
        "--loads",
        default=";".join(load.name for load in LOADS),
        metavar="A;B;...",
        help="default: %(default)s",
    )
    add(
        "--requests",
        type=int,
        default=DEFAULTS.num_requests,
        metavar="N",
        help="of each row, load and way to ask (default: %(default)s)",
    )
    add(
        "--turns",
        type=int,
        default=DEFAULTS.num_turns,
        metavar="N",
        help="in so many turns the rows get their requests (default: %(default)s)",
    )
    add(
        "--concurrency",
        type=int,
        default=DEFAULTS.concurrency,
        metavar="N",
        help="requests at a time in the closed loop (default: %(default)s)",
    )
    add(
        "--rate",
        type=float,
        default=DEFAULTS.rate_per_s,
        metavar="N",
        help="requests a second in the open loop (default: %(default)g)",
    )
    add(
        "--seconds",
        type=float,
        default=DEFAULTS.seconds,
        metavar="N",
        help="how long the open loop lasts for each row and load (default: %(default)g)",
    )
    add(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="a setting of the mesh that is measured; may be repeated",
    )
    add(
        "--command",
        default="",
        metavar="CMD",
        help="also measure this server: it is started, asked like the gateway, and stopped",
    )
    add(
        "--command-url",
        default="",
        metavar="URL",
        help="where it answers as OpenAI's API does: http://HOST:PORT",
    )
    add(
        "--command-grpc",
        default="",
        metavar="HOST:PORT",
        help="where it answers as a router of firsttoken does",
    )
    add("--command-model", default="", metavar="NAME", help="the model to ask it for")  # fmt: skip
    add_plot_option(parser)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tells on stderr how far it is. Raises InvalidArgument and Failure."""
    plan = read_plan(arguments)
    config = change(overhead.CONFIG, parse_assignments(arguments.assignments))
    foreign = read_foreign(arguments)
    check_writable(arguments.plot)
    try:
        document = uvloop.run(_measure(config, plan, foreign))
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error
    except MeshError as error:
        raise rpc.to_failure(error, nobody="the mesh has stopped answering") from None
    except ConnectionError as error:
        raise Failure(f"a request failed: {error}") from error
    if arguments.plot is not None:
        arguments.plot.write_text(overhead_tables.page(document), encoding="utf-8")
    return document


def show(document: dict[str, Any]) -> None:
    print(*overhead_tables.lines_of(document), sep="\n")


def read_plan(arguments: argparse.Namespace) -> overhead.Plan:
    """Raises InvalidArgument."""
    rows = _chosen("--rows", arguments.rows.split(","), NAMES)
    loads = {load.name: load for load in LOADS}
    chosen = _chosen("--loads", arguments.loads.split(";"), tuple(loads))
    return overhead.Plan(
        rows=rows,
        loads=tuple(loads[name] for name in chosen),
        num_turns=_within("--turns", arguments.turns, 1000),
        num_requests=_within("--requests", arguments.requests, MAX_REQUESTS),
        concurrency=_within("--concurrency", arguments.concurrency, MAX_CONCURRENCY),
        rate_per_s=_within("--rate", arguments.rate, MAX_RATE),
        seconds=_within("--seconds", arguments.seconds, MAX_SECONDS),
    )


def read_foreign(arguments: argparse.Namespace) -> Foreign | None:
    """Raises InvalidArgument."""
    foreign = Foreign(
        arguments.command,
        arguments.command_url,
        arguments.command_grpc,
        arguments.command_model,
    )
    foreign.check()
    return foreign if foreign.line else None


async def _measure(
    config: MeshConfig, plan: overhead.Plan, foreign: Foreign | None
) -> dict[str, Any]:
    mesh = run_quiet_mesh(config, num_workers=1, with_kvstore=False, with_gateway=True)
    async with mesh as running:
        measuring = overhead.measure(
            running.router, running.control, running.http, plan, foreign=foreign, tell=_tell
        )
        return {"benchmark": "overhead", **await running.run_beside(measuring)}


def _chosen(option: str, names: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    wanted = [name.strip() for name in names if name.strip()]
    for name in wanted:
        if name not in known:
            raise InvalidArgument.of(
                option, f"{name[:40]!r} is not known; there are {', '.join(map(repr, known))}"
            )
    if not wanted:
        raise InvalidArgument.of(option, f"must name some of {', '.join(map(repr, known))}")
    return tuple(wanted)


def _within(option: str, value: Any, most: float) -> Any:
    if not (math.isfinite(value) and 0 < value <= most):
        raise InvalidArgument.of(option, f"must be above 0, and at most {most:g}; got {value:g}")
    return value


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

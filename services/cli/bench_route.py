"""firsttoken bench route: strategies on one workload, in virtual time or on real processes."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from services.bench import decisions, offline, route, route_live, workload_traces
from services.bench.workloads import Chats, SharedPrefix, change, make
from services.cli import plot, route_tables
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.page_file import add_plot_option, check_writable
from services.cli.plans import run_quiet_mesh
from services.cli.settings import parse_assignments
from services.core.errors import InvalidArgument
from services.core.settings import ROUTING_STRATEGIES
from services.core.workload import MAX_DURATION_S, Workload
from services.runtime.startup import StartupError

# Of a worker, where nothing else is said: a made load is to be too large for one cache.
MADE_BLOCKS, TRACE_BLOCKS = 384, 5_000
UNLIMITED = "unlimited"
_ALL = ",".join(ROUTING_STRATEGIES)
WORKLOADS: Mapping[str, type[SharedPrefix | Chats]] = {
    "shared-prefix": SharedPrefix,
    "chats": Chats,
}
# Options that describe a made load, with the field of each.
_SHAPE = {
    "prefixes": "num_prefixes",
    "prefix_tokens": "prefix_tokens",
    "zipf": "zipf",
    "suffix_tokens": "suffix_tokens",
    "output_tokens": "output_tokens",
    "low_tokens": "low_tokens",
    "high_tokens": "high_tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part",
        choices=("decisions", "offline"),
        help="decisions: how many a router's core makes a second on one core, by workers and by"
        " indexed blocks; no other option is of use with it. offline: kv_aware beside a router"
        " that knows all caches, one request after the other, of a trace or a made load;"
        " --workers and --blocks are of use, too",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--trace",
        metavar="NAME|FILE",
        help=f"replay {', '.join(workload_traces.TRACES)}, or a file in one of their formats or"
        " in our own (services/bench/traces/README.md)",
    )
    what.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        default="shared-prefix",
        help="make a load (default: shared-prefix)",
    )
    parser.add_argument(
        "--strategies",
        default=_ALL,
        metavar="A,B,...",
        help=f"default: {_ALL}",
    )
    parser.add_argument("--workers", type=_count(1_000), default=8, metavar="N")
    parser.add_argument(
        "--prefill-workers",
        type=int,
        default=0,
        metavar="N",
        help="so many of the workers compute prompts, the others answer (default: 0, all do both)",
    )
    parser.add_argument("--routers", type=_count(64), default=1, metavar="N")
    parser.add_argument(
        "--rate",
        type=_positive,
        metavar="N",
        help="requests a second (default: 38.8, or what the trace has)",
    )
    parser.add_argument(
        "--requests",
        type=_count(10_000_000),
        metavar="N",
        help="default: 2000, or all of the trace",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="start the mesh's processes, with one router, and load their HTTP edge in real time",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--blocks",
        type=_blocks,
        metavar="N|unlimited",
        help=f"KV blocks of each worker (default: {MADE_BLOCKS}, for a trace {TRACE_BLOCKS})",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="a setting of the mesh; may be repeated",
    )
    shape = parser.add_argument_group("of a made load")
    for name in ("prefixes", "prefix_tokens", "suffix_tokens"):
        shape.add_argument(_flag(name), type=_count(1 << 20), metavar="N", help="shared-prefix")
    shape.add_argument("--zipf", type=_positive, metavar="X", help="shared-prefix: its exponent")
    for name in ("low_tokens", "high_tokens"):
        shape.add_argument(_flag(name), type=_count(1 << 20), metavar="N", help="chats: length")
    shape.add_argument(_flag("output_tokens"), type=_count(1 << 20), metavar="N")
    add_plot_option(parser)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tells on stderr how far it is. Raises InvalidArgument."""
    if arguments.part is not None:
        _check_part(arguments)
        if arguments.part == "decisions":
            return decisions.measure(tell=_tell)
        return _measure_offline(arguments)
    check_writable(arguments.plot)
    workload = _workload(arguments)
    _check_duration(workload, arguments.rate)
    strategies = _strategies(arguments.strategies)
    plan = route.RoutePlan(
        config=_config(arguments, workload),
        strategies=strategies,
        num_workers=arguments.workers,
        num_prefill_workers=_prefill_workers(arguments),
        num_routers=arguments.routers,
        seed=arguments.seed,
    )
    if arguments.live:
        document = asyncio.run(_measure_live(workload, plan))
    else:
        document = route.measure(workload, plan, tell=_tell)
    if arguments.plot is not None:
        cells = map(route_tables.cells, document["strategies"])
        page = plot.page(document, route_tables.headline(document), route_tables.HEADER, cells)
        arguments.plot.write_text(page, encoding="utf-8")
    return document


def _prefill_workers(arguments: argparse.Namespace) -> int:
    number: int = arguments.prefill_workers
    if not 0 <= number < arguments.workers:
        raise InvalidArgument.of(
            "--prefill-workers",
            f"must be in [0, {arguments.workers - 1}]: of the --workers, some must answer; got"
            f" {number}",
        )
    if number and arguments.live:
        raise InvalidArgument.of("--prefill-workers", "must be 0 with --live")
    return number


def _check_part(arguments: argparse.Namespace) -> None:
    """Raises InvalidArgument for an option that says nothing there."""
    whole: Mapping[str, object] = {
        **{"plot": None, "live": False, "assignments": []},
        **{"strategies": _ALL, "routers": 1, "prefill_workers": 0},
    }
    for name, default in whole.items():
        if getattr(arguments, name) != default:
            flag = {"assignments": "--set"}.get(name, _flag(name))
            raise InvalidArgument.of(flag, f"is of no use with --part {arguments.part}")


def _measure_offline(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = offline.SIZES
    if arguments.blocks is not None:
        sizes = [None if arguments.blocks == UNLIMITED else arguments.blocks]
    return offline.measure(
        _workload(arguments), num_workers=arguments.workers, sizes=sizes, tell=_tell
    )


async def _measure_live(workload: Workload, plan: route.RoutePlan) -> dict[str, Any]:
    if plan.num_routers > 1:
        raise InvalidArgument.of("--routers", "must be 1 with --live")
    route.check_fits(workload, plan.config)
    _tell(f"starting {plan.num_workers} workers …")
    mesh = run_quiet_mesh(
        plan.config, num_workers=plan.num_workers, with_kvstore=False, with_gateway=True
    )
    try:
        async with mesh as running:
            return await running.run_beside(
                route_live.measure(running.http, running.control, workload, plan, tell=_tell)
            )
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error


def show(document: dict[str, Any]) -> None:
    is_whole = document["benchmark"] == "route"
    print(*(route_tables.lines_of if is_whole else show_figures)(document), sep="\n")


def _workload(arguments: argparse.Namespace) -> Workload:
    shape = {
        field: getattr(arguments, name)
        for name, field in _SHAPE.items()
        if getattr(arguments, name) is not None
    }
    if arguments.trace is not None:
        for name, field in _SHAPE.items():
            if field in shape:
                raise InvalidArgument.of(_flag(name), "is of no use with --trace")
        workload = workload_traces.read_trace(arguments.trace)
        return change(workload, num_requests=arguments.requests, rate_per_s=arguments.rate)
    kind = WORKLOADS[arguments.workload]
    common = {"num_requests": arguments.requests, "rate_per_s": arguments.rate}
    given = {name: value for name, value in common.items() if value is not None}
    changes = parse_assignments(arguments.assignments)
    if "mesh.block_tokens" in changes:
        given["block_tokens"] = changes["mesh.block_tokens"]
    try:
        load = kind(seed=arguments.seed, **given, **shape)
    except TypeError:
        fields = kind.__dataclass_fields__
        name = next(
            name for name, field in _SHAPE.items() if field in shape and field not in fields
        )
        raise InvalidArgument.of(_flag(name), f"is of no use with {arguments.workload}") from None
    if isinstance(load, Chats) and load.low_tokens > load.high_tokens:
        raise InvalidArgument.of("--low-tokens", f"must be at most {load.high_tokens}")
    return make(load)


def _check_duration(workload: Workload, rate_per_s: float | None) -> None:
    if rate_per_s is not None and (workload.num_requests - 1) / rate_per_s > MAX_DURATION_S:
        raise InvalidArgument.of(
            "--rate",
            f"is so small that {workload.num_requests} requests would take more than"
            f" {MAX_DURATION_S / 86_400:g} days: raise it, or lower --requests",
        )


def _config(arguments: argparse.Namespace, workload: Workload) -> Any:
    changes = parse_assignments(arguments.assignments)
    if "router.routing_strategy" in changes:
        raise InvalidArgument.of("router.routing_strategy", "is set by --strategies")
    blocks = changes.get("mesh.block_tokens", workload.block_tokens)
    if blocks != workload.block_tokens:
        raise InvalidArgument.of(
            "mesh.block_tokens", f"must be the workload's, {workload.block_tokens}; got {blocks}"
        )
    default = MADE_BLOCKS if arguments.trace is None else TRACE_BLOCKS
    num_blocks = default if arguments.blocks is None else arguments.blocks
    if num_blocks == UNLIMITED:
        checked = route.make_config(workload, num_blocks=default, changes=changes)
        num_blocks = route.enough_blocks(workload, checked.worker.num_slots)
    return route.make_config(workload, num_blocks=num_blocks, changes=changes)


def _strategies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ROUTING_STRATEGIES:
            raise InvalidArgument.of(
                "--strategies",
                f"{name[:40]!r} is no strategy; there are {', '.join(ROUTING_STRATEGIES)}",
            )
    if not names:
        raise InvalidArgument.of(
            "--strategies", f"must name some of {', '.join(ROUTING_STRATEGIES)}"
        )
    return list(dict.fromkeys(names))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _count(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:  # argparse tells people this name
        value = int(text)
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"must be in [1, {most}]")
        return value

    return count


def _blocks(text: str) -> int | str:
    if text == UNLIMITED:
        return text
    value = int(text)
    if not 1 <= value <= 10_000_000:
        raise argparse.ArgumentTypeError(f"must be {UNLIMITED}, or in [1, 10000000]")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= 1e6):
        raise argparse.ArgumentTypeError("must be above 0, and at most 1e6")
    return value

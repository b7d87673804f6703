"""firsttoken bench: measure. Ratios hold across machines, figures do not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from services.bench import reuse
from services.cli import (
    bench_bubbles,
    bench_config,
    bench_edge,
    bench_kv,
    bench_ladder,
    bench_lan,
    bench_ledger,
    bench_overhead,
    bench_pools,
    bench_route,
    bench_spec,
    bench_streams,
    bench_telemetry,
    bench_tokenize,
    rpc,
)

MAX_COUNT = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    shared = benchmarks.add_parser(
        "reuse", help="what a shared prefix saves: a second prompt against the first"
    )
    shared.add_argument("--shared-tokens", type=_count, default=500, metavar="N")
    shared.add_argument("--pairs", type=_count, default=5, metavar="N")
    rpc.add_router_option(shared)
    kv = benchmarks.add_parser("kv", help="what KV that travels costs and saves")
    bench_kv.add_arguments(kv)
    edge = benchmarks.add_parser("edge", help="what HTTP in front of the mesh costs")
    bench_edge.add_arguments(edge)
    route = benchmarks.add_parser("route", help="strategies of routing, on a trace or a made load")
    bench_route.add_arguments(route)
    ladder = benchmarks.add_parser("ladder", help="one optimisation after the other")
    bench_ladder.add_arguments(ladder)
    closed = benchmarks.add_parser(
        "ledger", help="how much of the time to first token has an owner"
    )
    bench_ledger.add_arguments(closed)
    told = benchmarks.add_parser("telemetry", help="what telling the observer costs")
    bench_telemetry.add_arguments(told)
    many = benchmarks.add_parser("streams", help="many streams at once, and a slow client")
    bench_streams.add_arguments(many)
    idle = benchmarks.add_parser("bubbles", help="how long the engine waits for the mesh")
    bench_bubbles.add_arguments(idle)
    unequal = benchmarks.add_parser("lan", help="unequal calls over unequal machines")
    bench_lan.add_arguments(unequal)
    overhead = benchmarks.add_parser("overhead", help="what the service layer costs")
    bench_overhead.add_arguments(overhead)
    pools = benchmarks.add_parser("pools", help="several connections to a peer against one")
    bench_pools.add_arguments(pools)
    keys = benchmarks.add_parser("config", help="a configuration of 10,000 keys against one of 10")
    bench_config.add_arguments(keys)
    spec = benchmarks.add_parser("spec", help="what drafts of the next tokens bring")
    bench_spec.add_arguments(spec)
    tokens = benchmarks.add_parser(
        "tokenize", help="what encoding costs, and what ids of what was seen before save"
    )
    bench_tokenize.add_arguments(tokens)
    measured = (
        *(tokens, told, closed, shared, kv, edge, route, ladder, overhead, idle, many, pools, keys),
        spec,
        unequal,
    )
    for parser in measured:
        parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    match arguments.benchmark:
        case "route":
            return _end(rpc.readably(bench_route.measure, arguments), bench_route.show, arguments)
        case "tokenize":
            document = rpc.readably(bench_tokenize.measure, arguments)
            return _end(document, bench_tokenize.show, arguments)
        case "ladder":
            document = rpc.readably(bench_ladder.measure, arguments)
            _end(document, bench_ladder.show, arguments)
            return bench_ladder.exit_status(document)
        case "overhead":
            document = rpc.readably(bench_overhead.measure, arguments)
            return _end(document, bench_overhead.show, arguments)
        case "kv":
            measuring, show = bench_kv.measure(arguments.parts), bench_kv.show
        case "ledger":
            measuring = bench_ledger.measure(
                num_requests=arguments.requests, concurrency=arguments.concurrency
            )
            show = bench_ledger.show
        case "telemetry":
            measuring = bench_telemetry.measure(
                num_turns=arguments.turns,
                requests_per_turn=arguments.requests,
                feed_s=arguments.seconds,
            )
            show = bench_telemetry.show
        case "lan":
            measuring = bench_lan.measure(seeds=arguments.seeds)
            show = bench_lan.show
        case "bubbles":
            measuring = bench_bubbles.measure(window_s=arguments.seconds)
            show = bench_bubbles.show
        case "streams":
            measuring = bench_streams.measure(
                arguments.streams,
                window_s=arguments.seconds,
                num_turns=arguments.turns,
                through=arguments.through,
            )
            show = bench_streams.show
        case "pools":
            measuring = bench_pools.measure(
                arguments.parts, seconds=arguments.seconds, num_turns=arguments.turns
            )
            show = bench_pools.show
        case "config":
            measuring = bench_config.measure(
                num_requests=arguments.requests,
                num_turns=arguments.turns,
                num_pushes=arguments.pushes,
            )
            show = bench_config.show
        case "spec":
            measuring, show = bench_spec.measure(arguments), bench_spec.show
        case "edge":
            measuring = bench_edge.measure(arguments.engines, load_s=arguments.seconds)
            show = bench_edge.show
        case _:
            measuring, show = _reuse(arguments), _show_reuse
    return _end(rpc.run(measuring), show, arguments)


def _end(
    document: dict[str, Any], show: Callable[[dict[str, Any]], None], arguments: argparse.Namespace
) -> int:
    if arguments.json:
        print(json.dumps(document), flush=True)
    else:
        show(document)
    return 0


def _show_reuse(document: dict[str, Any]) -> None:
    print(f"{document['pairs']} pairs of prompts sharing about {document['shared_tokens']} tokens")
    for name in ("first", "second"):
        print(f"  TTFT of the {name:<6} {document[f'{name}_ttft_ms']:9.1f} ms")
    print(f"  ratio             {document['ttft_ratio']:9.3f}")
    print(
        f"  the second reused {document['cached_tokens']} of {document['prompt_tokens']} tokens;"
        f" the engine ({document['engine']}) evaluated {document['evaluated_prompt_tokens']}"
    )


async def _reuse(arguments: argparse.Namespace) -> dict[str, Any]:
    client_of = rpc.mesh_client(
        arguments.router, tls_dir=arguments.tls_dir, api_key=arguments.api_key
    )
    async with client_of as client:
        pairs = await reuse.measure(
            client, shared_tokens=arguments.shared_tokens, num_pairs=arguments.pairs
        )
    return reuse.to_document(pairs, shared_tokens=arguments.shared_tokens)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"must be in [1, {MAX_COUNT}]")
    return value

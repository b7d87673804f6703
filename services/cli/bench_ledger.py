"""firsttoken bench ledger: how much of the time to first token has an owner."""

from __future__ import annotations

import argparse
from typing import Any

from firsttoken.client import MeshClient
from services.bench import ledger
from services.cli.failures import CANNOT_START, Failure
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError

MAX_REQUESTS, MAX_CONCURRENCY = 100_000, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=_requests, default=500, metavar="N")
    parser.add_argument(
        "--concurrency", type=_concurrency, default=2, metavar="N", help="at a time (default 2)"
    )


async def measure(*, num_requests: int, concurrency: int) -> dict[str, Any]:
    mesh = run_quiet_mesh(ledger.CONFIG, num_workers=1, num_prefill_workers=1, with_gateway=True)
    try:
        async with mesh as running, MeshClient(running.router) as client:
            place = ledger.Place(client, running.http)
            measuring = ledger.measure(place, num_requests=num_requests, concurrency=concurrency)
            return {"benchmark": "ledger", **await running.run_beside(measuring)}
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error


def show(document: dict[str, Any]) -> None:
    print(
        f"{document['requests']} requests on the real engine, {document['concurrency']} at a time."
        f" Closed: what no segment owns is within {document['closed_ms']:g} ms or"
        f" {document['closed_share']:.0%}."
    )
    print(f"{'':<32}{'requests':>9}{'closed':>9}{'total':>10}{'residual in ms':>27}")
    print(f"{'':<32}{'':>9}{'':>9}{'P50 ms':>10}{'P50':>9}{'P99':>9}{'worst':>9}")
    for row in (*document["kinds"], document["all"]):
        print(
            f"{row['kind']:<32}{row['requests']:>9}{row['closed']:>9.1%}"
            f"{row['total_p50_ms']:>10.1f}{row['residual_p50_ms']:>9.3f}"
            f"{row['residual_p99_ms']:>9.3f}{row['residual_worst_ms']:>9.3f}"
        )


def _requests(text: str) -> int:
    return _count(text, MAX_REQUESTS)


def _concurrency(text: str) -> int:
    return _count(text, MAX_CONCURRENCY)


def _count(text: str, most: int) -> int:
    value = int(text)
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"must be in [1, {most}]")
    return value

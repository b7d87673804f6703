"""firsttoken bench tokenize: what encoding costs, and what ids of what was seen before save."""

from __future__ import annotations

import argparse
from typing import Any

from firsttoken.client import MeshClient
from services.bench import tokenizing, tokenizing_live
from services.cli import rpc
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError

REQUESTS_PER_TURN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="", metavar="MODEL",
        help="whose tokenizer (default: the built-in model's)")  # fmt: skip
    add("--rounds", type=_count, default=tokenizing.NUM_ROUNDS, metavar="N",
        help=f"prompts of each kind (default {tokenizing.NUM_ROUNDS})")  # fmt: skip
    add("--live", type=_count, default=0, metavar="TURNS",
        help="also run a mesh, in which router and tokenizer service encode by turns")  # fmt: skip


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        document = tokenizing.measure(model=arguments.model, num_rounds=arguments.rounds)
        if arguments.live:
            document["live"] = rpc.run(_measure_live(arguments.live))
    except StartupError as error:
        raise Failure(str(error), exit_status=CANNOT_START) from error
    return document


async def _measure_live(num_turns: int) -> dict[str, Any]:
    mesh = run_quiet_mesh(tokenizing_live.CONFIG, num_workers=1, with_kvstore=False)
    async with mesh as running, MeshClient(running.router) as client:
        measuring = tokenizing_live.measure(
            client, running.control, num_turns=num_turns, requests_per_turn=REQUESTS_PER_TURN
        )
        return await running.run_beside(measuring)


def show(document: dict[str, Any]) -> None:
    print(f"{document['model']}, {document['rounds']} prompts of each kind, medians in us")
    print(f"{'':<36}{'':>8}{'CPU time':>20}{'':>8}{'until it is there':>20}")
    print(f"{'':<36}{'tokens':>8}{'whole':>10}{'kept':>10}{'ratio':>8}{'whole':>10}{'kept':>10}")
    for row in document["rows"]:
        print(
            f"{row['prompt']:<36}{row['tokens']:>8}{row['whole_cpu_us']:>10.0f}"
            f"{row['kept_cpu_us']:>10.0f}{row['cpu_ratio']:>8.3f}"
            f"{row['whole_us']:>10.0f}{row['kept_us']:>10.0f}"
        )
    parts = document["parts_cpu_us"]
    print(
        f"Of a chat seen before, {parts['all']:.0f} us: the template {parts['template']:.0f},"
        f" prefix keys {parts['prefix_keys']:.0f}"
    )
    if live := document.get("live"):
        print(*show_figures({"in a mesh": live}, ""), sep="\n")


def _count(text: str) -> int:
    value = int(text)
    if not 2 <= value <= 100_000:
        raise argparse.ArgumentTypeError("must be in [2, 100000]")
    return value

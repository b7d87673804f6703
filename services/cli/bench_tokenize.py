"""firsttoken bench tokenize: what encoding costs, and what ids of what was seen before save."""

from __future__ import annotations

import argparse
from typing import Any

from services.bench import tokenize
from services.cli.failures import CANNOT_START, Failure
from services.runtime.startup import StartupError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model", default="", metavar="MODEL", help="whose tokenizer (default: the embedded one's)"
    )
    add("--rounds", type=_count, default=tokenize.NUM_ROUNDS, metavar="N",
        help=f"prompts of each kind (default {tokenize.NUM_ROUNDS})")  # fmt: skip


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        return tokenize.measure(model=arguments.model, num_rounds=arguments.rounds)
    except StartupError as error:
        raise Failure(str(error), exit_status=CANNOT_START) from error


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


def _count(text: str) -> int:
    value = int(text)
    if not 2 <= value <= 100_000:
        raise argparse.ArgumentTypeError("must be in [2, 100000]")
    return value

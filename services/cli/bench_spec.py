"""firsttoken bench spec: what drafts of the next tokens bring on the embedded engine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from services.bench import speculation
from services.cli.failures import CANNOT_START, Failure
from services.cli.figures import show_figures
from services.cli.plans import run_quiet_mesh
from services.runtime.startup import StartupError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--draft", type=_count, default=8, metavar="N",
        help=f"longest draft, {speculation.SETTING} (default 8)")  # fmt: skip
    add("--turns", type=_count, default=3, metavar="N", help="by turns (default 3)")
    add("--tokens", type=_count, default=160, metavar="N", help="of an answer (default 160)")
    add("--at-once", type=_count, action="append", metavar="N",
        help="answers at a time; may be repeated (default 1 and 4)")  # fmt: skip


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tells on stderr how far it is."""
    mesh = run_quiet_mesh(speculation.CONFIG, num_workers=1, with_kvstore=False)
    try:
        async with mesh as running:
            measuring = speculation.measure(
                running.router,
                running.control,
                max_draft_tokens=arguments.draft,
                num_turns=arguments.turns,
                answer_tokens=arguments.tokens,
                concurrencies=arguments.at_once or (1, 4),
                tell=lambda what: print(f"{what} …", file=sys.stderr, flush=True),
            )
            rows = await running.run_beside(measuring)
    except StartupError as error:  # this machine lacks something
        raise Failure(str(error), exit_status=CANNOT_START) from error
    return {
        "benchmark": "spec",
        "engine": "llamacpp",
        "max_draft_tokens": arguments.draft,
        "answer_tokens": arguments.tokens,
        "rows": rows,
    }


def show(document: dict[str, Any]) -> None:
    print(*show_figures(document, ""), sep="\n")


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 64 * 1024:
        raise argparse.ArgumentTypeError("must be in [1, 65536]")
    return value

"""The `firsttoken` command: finds the subcommand's module and runs it."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol, cast

from services.cli.failures import Failure

# Only the chosen command's module is imported: `--help` must not wait for gRPC.
COMMANDS = {
    "up": "run a whole mesh on this machine",
    "generate": "answer a prompt, and show where its time to first token went",
    "status": "show the members of a mesh and what they are doing",
    "config": "read and change a mesh's configuration",
    "kv": "show what the KV stores hold, and drop it",
    "bench": "measure a running mesh",
}


class Command(Protocol):
    """What the module of a subcommand offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """The exit status. Raises Failure for what a person can put right."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    chosen = _parser().parse_args(argv)
    command = cast(Command, importlib.import_module(f"services.cli.{chosen.command}"))
    parser = argparse.ArgumentParser(
        prog=f"firsttoken {chosen.command}", description=f"{COMMANDS[chosen.command]}."
    )
    command.add_arguments(parser)
    arguments = parser.parse_args(chosen.arguments)
    try:
        return command.run(arguments)
    except Failure as failure:
        return _report(failure, as_json=getattr(arguments, "json", False))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="firsttoken",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A gRPC mesh that serves large language models with the lowest"
        " time to first token.",
        epilog="commands:\n"
        + "".join(f"  {name:<10} {text}\n" for name, text in COMMANDS.items())
        + "\n`firsttoken COMMAND --help` says more about one.",
    )
    parser.add_argument(
        "--version", action="version", version=f"firsttoken {version('firsttoken')}"
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser


def _report(failure: Failure, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": failure.fields()}), flush=True)
    else:
        print(f"firsttoken: {failure}", file=sys.stderr, flush=True)
    return failure.exit_status


if __name__ == "__main__":
    raise SystemExit(main())

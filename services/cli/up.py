"""firsttoken up: a whole mesh on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from services.cli.answers import SIMULATED
from services.cli.failures import CANNOT_START, Failure
from services.cli.first_answer import answer_first_prompt, describe_openness, print_endpoints
from services.cli.folders import remove_stale_runs
from services.cli.invitation import JOIN_PORT
from services.cli.lan import ANYWHERE, lan_tls_directory, open_desk, own_address
from services.cli.logs import RunLogs
from services.cli.mesh import Listens, LocalMesh, MeshPlan
from services.cli.plans import plan_mesh
from services.cli.rpc import API_KEY_VARIABLE
from services.cli.screen import Screen
from services.cli.settings import parse_assignments
from services.cli.shell import run_shell_command
from services.cli.snippets import HttpEdge
from services.control.configfile import read_config
from services.core.config import flatten, nest, parse
from services.core.errors import InvalidArgument
from services.core.settings import ENGINES, MeshConfig
from services.models.catalog import find_model
from services.runtime.startup import StartupError
from services.runtime.tls import CA_FILE, TLS_DIR_VARIABLE, Tls

HOST = "127.0.0.1"
ROUTER_PORT = 7100
CONTROL_PORT = 7101
HTTP_PORT = 7180
PAGE_PORT = 7190
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.toml", help="the configuration")
    add("--workers", type=_count, default=2, metavar="N", help="worker processes (default 2)")
    add("--prefill-workers", type=_count_or_zero, default=0, metavar="N",
        help="further ones that only compute prompts for those (default 0)")  # fmt: skip
    add("--no-kvstore", action="store_true",
        help="keep no KV blocks outside the workers")  # fmt: skip
    add("--engine", choices=ENGINES, help="instead of the setting worker.engine")
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting, over what the file says; may be repeated")  # fmt: skip
    add("--port", type=_port, metavar="N", help=f"the router's (default {ROUTER_PORT}; 0: any)")
    add("--control-port", type=_port, metavar="N",
        help=f"the control service's (default {CONTROL_PORT}; 0: any)")  # fmt: skip
    add("--http-port", type=_port, metavar="N",
        help=f"the gateway's, for OpenAI's clients (default {HTTP_PORT}; 0: any)")  # fmt: skip
    add("--no-gateway", action="store_true", help="gRPC alone, no HTTP")
    add("--page-port", type=_port, metavar="N",
        help=f"the observer's, for its page (default {PAGE_PORT}; 0: any)")  # fmt: skip
    add("--no-observer", action="store_true", help="no page, no traces, no metrics")
    add("--tls", nargs="?", const="", default=os.environ.get(TLS_DIR_VARIABLE) or None,
        metavar="DIR", help="encrypt everything, with the certificates in DIR; those that DIR"
        " lacks are made, by a CA of this machine's own (default: of this run alone)")  # fmt: skip
    add("--lan", nargs="?", const="", metavar="ADDRESS",
        help="let workers on other machines of the local network join, by the command that is"
        " printed: control and the port to join listen on this machine's ADDRESS (default: that"
        " of its default route), with TLS")  # fmt: skip
    add("--join-port", type=_port, default=JOIN_PORT, metavar="N",
        help=f"with --lan, where they ask to join (default {JOIN_PORT}; 0: any)")  # fmt: skip
    add("--mtls-port", type=_port, metavar="N",
        help="with --tls, one more port, on which callers show certificates")  # fmt: skip
    add("--exec", metavar="CMD",
        help="run CMD through the shell against the ready mesh, with FIRSTTOKEN_ROUTER and"
        " FIRSTTOKEN_CONTROL (host:port), FIRSTTOKEN_HTTP, FIRSTTOKEN_PAGE (URLs), and"
        " FIRSTTOKEN_TLS_DIR, in its environment, stop everything, and exit with CMD's status;"
        " ports not given are then any")  # fmt: skip
    add("--no-prompt", action="store_true", help="do not answer a first prompt")
    add("--verbose", action="store_true", help="show all that the services log")


def run(arguments: argparse.Namespace) -> int:
    config = _configuration(arguments)
    if arguments.lan is not None:
        arguments.lan = arguments.lan or own_address(*ANYWHERE)
        if not arguments.tls:
            # The same in the next run: who has joined comes back by himself.
            arguments.tls = str(lan_tls_directory())
    listens = _listens(arguments)
    tls_dir = _tls_dir(Path(arguments.tls).absolute()) if arguments.tls else None
    remove_stale_runs()

    directory = Path(tempfile.mkdtemp(prefix="firsttoken-"))
    if arguments.tls == "":
        tls_dir = _tls_dir(directory / "tls")
    plan = plan_mesh(
        config,
        directory,
        num_workers=arguments.workers,
        num_prefill_workers=arguments.prefill_workers,
        with_kvstore=not arguments.no_kvstore,
        listens=listens,
        tls_dir=tls_dir,
    )
    level = logging.DEBUG if arguments.verbose else logging.WARNING
    try:
        with RunLogs(directory, least_level=level) as logs:
            status = asyncio.run(_run(plan, logs, config, arguments))
    except Failure as failure:
        failure.add_hint(f"logs: {directory}")
        raise
    except KeyboardInterrupt:  # too early for anything to have started
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if status == 0:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"firsttoken: logs: {directory}", file=sys.stderr)
    return status


async def _run(
    plan: MeshPlan, logs: RunLogs, config: MeshConfig, arguments: argparse.Namespace
) -> int:
    screen = Screen()
    mesh = LocalMesh(plan, logs=logs, report=screen.report)
    serving = asyncio.ensure_future(_serve(mesh, screen, config, arguments))
    received: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        received.append(number)
        if mesh.stopping or len(received) > 1:
            mesh.kill()
        else:
            serving.cancel()

    with _on_signals(interrupt):
        try:
            return await serving
        except asyncio.CancelledError:
            # Stopping is how a mesh ends; a command that was cut short has not ended well.
            return 128 + received[0] if arguments.exec else 0


async def _serve(
    mesh: LocalMesh, screen: Screen, config: MeshConfig, arguments: argparse.Namespace
) -> int:
    async with mesh, contextlib.AsyncExitStack() as stack:
        if openness := describe_openness(config, mesh.tls):
            screen.report("mesh", openness)
        if arguments.lan is not None:
            await stack.enter_async_context(open_desk(mesh, config, screen, arguments))
        if arguments.exec:
            environment = {
                "FIRSTTOKEN_ROUTER": mesh.router,
                "FIRSTTOKEN_CONTROL": mesh.control,
                "FIRSTTOKEN_HTTP": mesh.http,
                "FIRSTTOKEN_PAGE": mesh.page,
                TLS_DIR_VARIABLE: str(mesh.tls.directory) if mesh.tls else "",
            }
            return await mesh.run_beside(run_shell_command(arguments.exec, environment))
        simulated = config.worker.engine == SIMULATED
        print_endpoints(
            mesh.router,
            mesh.control,
            _http_edge(mesh, config),
            page=mesh.page,
            tls=mesh.tls,
            simulated=simulated,
        )
        if config.tenants and not os.environ.get(API_KEY_VARIABLE):
            screen.report("mesh", f"answers no first prompt: a caller needs {API_KEY_VARIABLE}")
        elif not arguments.no_prompt:
            await mesh.run_beside(answer_first_prompt(mesh.router, mesh.tls))
        screen.report("mesh", "serves until Ctrl-C")
        await mesh.run_beside(asyncio.Event().wait())
        return 0


def _http_edge(mesh: LocalMesh, config: MeshConfig) -> HttpEdge | None:
    if not mesh.http:
        return None
    return HttpEdge(
        url=mesh.http,
        model=find_model(config.mesh.model).name,
        asks_for_key=bool(config.tenants),
        ca_file=str(mesh.tls.directory / CA_FILE) if mesh.tls else "",
    )


@contextlib.contextmanager
def _on_signals(interrupt: Callable[[signal.Signals], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _configuration(arguments: argparse.Namespace) -> MeshConfig:
    """The file's configuration under the options'. Whatever is wrong with it is said now."""
    try:
        config = read_config(arguments.config) if arguments.config else MeshConfig()
        changes = parse_assignments(arguments.set)
        if arguments.engine:
            changes["worker.engine"] = arguments.engine
        config = parse(nest({**flatten(config), **changes}))
        find_model(config.mesh.model, with_weights=config.worker.engine != SIMULATED)
    except (StartupError, InvalidArgument) as error:
        raise Failure(str(error), exit_status=CANNOT_START) from None
    return config


def _tls_dir(directory: Path) -> Path:
    """With everything in it that TLS needs."""
    # Its imports take longer than all else that is needed to say what is wrong.
    from services.cli import local_ca

    local_ca.complete(directory)
    try:
        return Tls(directory).directory
    except StartupError as error:
        raise Failure(str(error), exit_status=CANNOT_START) from None


def _listens(arguments: argparse.Namespace) -> Listens:
    has_mtls, has_http = arguments.mtls_port is not None, not arguments.no_gateway
    has_page = not arguments.no_observer
    if has_mtls and arguments.tls is None:
        raise Failure("--mtls-port needs --tls", exit_status=CANNOT_START)
    usual = (ROUTER_PORT, CONTROL_PORT, HTTP_PORT, PAGE_PORT)
    defaults = (0, 0, 0, 0) if arguments.exec else usual
    return Listens(
        router=_listen("--port", arguments.port, defaults[0]),
        control=_listen(
            "--control-port", arguments.control_port, defaults[1], host=arguments.lan or HOST
        ),
        http=_listen("--http-port", arguments.http_port, defaults[2]) if has_http else "",
        page=_listen("--page-port", arguments.page_port, defaults[3]) if has_page else "",
        mtls=_listen("--mtls-port", arguments.mtls_port, 0) if has_mtls else "",
    )


def _listen(option: str, port: int | None, default: int, *, host: str = HOST) -> str:
    """The address to listen on. The service would notice a taken port too, but later."""
    chosen = default if port is None else port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, chosen))
        except OSError as error:
            raise Failure(
                f"cannot listen on {host}:{chosen}: {error.strerror};"
                f" choose another port with {option}",
                exit_status=CANNOT_START,
            ) from None
    return f"{host}:{chosen}"


def _count(text: str) -> int:
    return _within(text, 1, 64)


def _count_or_zero(text: str) -> int:
    return _within(text, 0, 64)


def _port(text: str) -> int:
    return _within(text, 0, 65535)


def _within(text: str, low: int, high: int) -> int:
    value = int(text)
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"must be in [{low}, {high}]")
    return value

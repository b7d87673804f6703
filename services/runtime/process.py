"""A node as a process: options, signals, readiness, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvloop

from services.core.errors import MeshError
from services.runtime import logs
from services.runtime.garbage import spare_what_is_there
from services.runtime.logs import event
from services.runtime.startup import StartupError
from services.runtime.tasks import CANCEL_INTERVAL_S
from services.runtime.tls import TLS_DIR_VARIABLE, Tls, require_private

EXIT_START_FAILED = 3
INSECURE_VARIABLE = "FIRSTTOKEN_INSECURE"
# The exporter's thread and the event loop share the GIL; at the default 5 ms its
# turns show in the loop's latency.
SWITCH_INTERVAL_S = 0.0005

logger = logging.getLogger(__name__)


class Node(Protocol):
    @property
    def address(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """`service` names the process in its logs; the rest as on the command line."""

    service: str
    listen: str = "127.0.0.1:0"
    control: str = ""
    ready_fd: int | None = None
    lifeline_fd: int | None = None
    tls_dir: Path | None = None
    insecure: bool = False

    def open_tls(self, *more_listens: str) -> Tls | None:
        """What is in `tls_dir`. Raises StartupError when it is of no use.

        Without one, also where `listen`, or one of `more_listens`, can be reached from elsewhere.
        """
        if self.tls_dir is not None:
            return Tls(self.tls_dir)
        for listen in (self.listen, *filter(None, more_listens)):
            require_private(listen, insecure=self.insecure)
        return None


def add_options(parser: argparse.ArgumentParser, *, control: bool = True) -> None:
    """The options that every process has."""
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    if control:
        parser.add_argument(
            "--control",
            required=True,
            metavar="HOST:PORT[,HOST:PORT…]",
            help="the control service's replicas",
        )
    add_tls_option(parser)
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=os.environ.get(INSECURE_VARIABLE) == "1",
        help=f"listen without TLS also where others can reach it (default: {INSECURE_VARIABLE}=1)",
    )
    parser.add_argument(
        "--ready-fd",
        type=int,
        metavar="N",
        help="write host:port and a newline to this descriptor once serving, and close it",
    )
    parser.add_argument(
        "--lifeline-fd",
        type=int,
        metavar="N",
        help="the read end of a pipe: stop when its other end is closed",
    )


def add_tls_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get(TLS_DIR_VARIABLE) or None,
        metavar="DIR",
        help=f"ca.pem, cert.pem and key.pem for TLS (default: {TLS_DIR_VARIABLE}; else no TLS)",
    )


def read_options(service: str, arguments: argparse.Namespace) -> ProcessOptions:
    return ProcessOptions(
        service=service,
        listen=arguments.listen,
        control=getattr(arguments, "control", ""),
        ready_fd=arguments.ready_fd,
        lifeline_fd=arguments.lifeline_fd,
        tls_dir=arguments.tls_dir,
        insecure=arguments.insecure,
    )


def run_node(
    make_node: Callable[[], AbstractAsyncContextManager[Node]], options: ProcessOptions
) -> int:
    """Run a node until SIGTERM, SIGINT or the lifeline's end; the exit code.

    0 after a stop that was asked for, 3 with one line on stderr when it cannot
    start. A second signal kills the process at once.
    """
    logs.configure(options.service)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for descriptor in (options.ready_fd, options.lifeline_fd):
        if descriptor is not None:
            # A process that the node starts would hold the pipe open: nobody could
            # wait for its end.
            os.set_inheritable(descriptor, False)
    return uvloop.run(_run(make_node, options))


async def _run(
    make_node: Callable[[], AbstractAsyncContextManager[Node]], options: ProcessOptions
) -> int:
    stop = asyncio.Event()
    started = False

    async def serve() -> None:
        nonlocal started
        async with make_node() as node:
            started = True
            spare_what_is_there()
            _announce(options, node.address)
            await stop.wait()
            event(logger, logging.INFO, f"{options.service} stopping")

    async def give_up_start() -> None:
        await stop.wait()
        # Again and again: see end_tasks. Once started, it leaves by itself.
        while not (started or serving.done()):
            serving.cancel()
            await asyncio.sleep(CANCEL_INTERVAL_S)

    serving = asyncio.ensure_future(serve())
    giving_up = asyncio.ensure_future(give_up_start())
    with _signals(stop.set), _lifeline(options.lifeline_fd, stop.set):
        try:
            await serving
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
        except BaseException as error:
            reason = None if started else startup_reason(error)
            if reason is None:
                raise
            print(f"{options.service}: {reason}", file=sys.stderr)
            return EXIT_START_FAILED
        finally:
            giving_up.cancel()
    event(logger, logging.INFO, f"{options.service} stopped")
    return 0


def _announce(options: ProcessOptions, address: str) -> None:
    message = f"{options.service} listening on {address}"
    event(logger, logging.INFO, message, address=address)
    if options.ready_fd is not None:
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(options.ready_fd, f"{address}\n".encode())
        os.close(options.ready_fd)


def startup_reason(error: BaseException) -> str | None:
    """The readable line of an error that start-up may end with; None for a defect."""
    if isinstance(error, StartupError | MeshError):
        return " ".join(str(error).split())
    if isinstance(error, BaseExceptionGroup):
        reasons = (startup_reason(inner) for inner in error.exceptions)
        return next((reason for reason in reasons if reason), None)
    return None


@contextlib.contextmanager
def _signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """The first signal asks for a stop; the next one has its default effect: it kills."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        restore()
        request_stop()

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def _lifeline(descriptor: int | None, request_stop: Callable[[], None]) -> Iterator[None]:
    """Ask for a stop when the pipe's other end is closed: the parent is gone."""
    if descriptor is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            request_stop()

    loop.add_reader(descriptor, on_readable)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)

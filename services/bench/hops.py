"""What one call of gRPC costs, by the ways that Python gives to make it. For developers.

`python services/bench/hops.py`: a table of ways, each a server and a client in processes of
their own, by turns. It needs grpcio and uvloop alone, so that other environments can be
compared: `--also NAME=PYTHON` adds a way whose two ends run there, `--also-server NAME=PYTHON`
one whose server does: pygrpc-native's two, where that is installed there.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

METHOD = "/firsttoken.bench.Hop/Echo"
NUM_BYTES = 100
IN_FLIGHT = (16, 64)
WARM_UP = 200
FIGURES = (
    *("alone p50 us", "p99 us"),
    *(f"calls/s at {number}" for number in IN_FLIGHT),
    *(f"{end} us at {number}" for number in IN_FLIGHT for end in ("client", "server")),
)
EVENT_ENGINE = "event_engine_client,event_engine_listener"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`server`: aio or threads, or pygrpc-native's of these.

    `experiments`: GRPC_EXPERIMENTS of both ends.
    """

    name: str
    server: str = "aio"
    server_python: str = sys.executable
    client_python: str = sys.executable
    is_unix: bool = False
    loop: str = "uvloop"
    experiments: str = ""
    num_processes: int = 1
    num_channels: int = 1


WAYS = (
    Way(name="aio, uvloop, TCP"),
    Way(name="unix socket", is_unix=True),
    Way(name="asyncio's loop", loop="asyncio"),
    Way(name="server of 8 threads", server="threads"),
    Way(name="event engine off", experiments="-" + EVENT_ENGINE.replace(",", ",-")),
    Way(name="event engine on", experiments=EVENT_ENGINE),
    Way(name="4 channels", num_channels=4),
    Way(name="2 processes, SO_REUSEPORT, 4 channels", num_processes=2, num_channels=4),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="hops", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--also-server", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    parser.add_argument("--channels", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--loop", default="uvloop", help=argparse.SUPPRESS)
    parser.add_argument("address", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return _serve(arguments.serve, arguments.address, arguments.loop)
    if arguments.call:
        calling = _call(arguments.address, arguments.channels, arguments.calls)
        print(json.dumps(_runner(arguments.loop)(calling)))
        return 0
    rows = measure(
        [*WAYS, *_others(arguments)], num_calls=arguments.calls, num_turns=arguments.turns
    )
    print(json.dumps(rows) if arguments.json else "\n".join(table(rows)))
    return 0


def measure(ways: Sequence[Way], *, num_calls: int, num_turns: int) -> list[dict[str, Any]]:
    """Medians of the turns, in each of which both ends are started anew."""
    seen: dict[str, dict[str, list[float]]] = {way.name: defaultdict(list) for way in ways}
    for turn in range(num_turns):
        shift = turn % len(ways)
        for way in (*ways[shift:], *ways[:shift]):
            print(f"turn {turn + 1}: {way.name} …", file=sys.stderr, flush=True)
            for figure, value in _take_turn(way, num_calls).items():
                seen[way.name][figure].append(value)
    return [
        {"way": name, **{figure: statistics.median(found[figure]) for figure in FIGURES}}
        for name, found in seen.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    figures = list(rows[0])[1:]
    yield f"| way | {' | '.join(figures)} |"
    yield "|---" * (len(figures) + 1) + "|"
    for row in rows:
        yield f"| {row['way']} | {' | '.join(f'{row[figure]:.0f}' for figure in figures)} |"


def _others(arguments: argparse.Namespace) -> Iterator[Way]:
    for text in arguments.also:
        name, _, python = text.partition("=")
        yield Way(name=name, server_python=python, client_python=python)
    for text in arguments.also_server:
        name, _, python = text.partition("=")
        has_native = subprocess.run([python, "-c", "import pygrpc_native"], check=False)
        servers = ("native aio", "native threads") if has_native.returncode == 0 else ("aio",)
        for server in servers:
            yield Way(name=f"{name}, {server}", server_python=python, server=server)


def _take_turn(way: Way, num_calls: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "hop")
        address = f"unix:{path}" if way.is_unix else f"127.0.0.1:{_free_port()}"
        environment = {**os.environ, "GRPC_EXPERIMENTS": way.experiments}
        with _servers(way, address, environment) as pids:
            command = [way.client_python, __file__, "--call", "yes", "--loop", way.loop]
            command += ["--calls", str(num_calls), "--channels", str(way.num_channels), address]
            # Its lines: when a part begins, which is when the servers' CPU is read.
            with _start(command, environment) as client:
                assert client.stdout is not None
                lines = [(line, _spend(pids)) for line in client.stdout]
            if client.returncode:
                raise SystemExit(f"{way.name}: the client failed")
    *parts, (last, _) = lines
    found: dict[str, float] = json.loads(last)
    at_s = {line.strip(): spent_s for line, spent_s in parts}
    for number in IN_FLIGHT:
        spent_s = at_s[f"end {number}"] - at_s[f"begin {number}"]
        found[f"server us at {number}"] = spent_s / num_calls * 1e6
    return found


@contextmanager
def _servers(way: Way, address: str, environment: dict[str, str]) -> Iterator[list[int]]:
    kind = f"{way.server}{'+' if way.num_processes > 1 else ''}"
    command = [way.server_python, __file__, "--serve", kind, "--loop", way.loop, address]
    with ExitStack() as stack:
        servers = []
        for _ in range(way.num_processes):
            server = stack.enter_context(_start(command, environment))
            # Left before it: leaving it waits for its end.
            stack.callback(server.kill)
            servers.append(server)
        for server in servers:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise SystemExit(f"{way.name}: the server did not start")
        yield [server.pid for server in servers]


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


def _serve(kind: str, address: str, loop: str) -> int:
    """Until it is killed."""
    reuses = kind.endswith("+")
    options = [("grpc.so_reuseport", int(reuses))]
    package: Any = importlib.import_module("pygrpc_native") if "native" in kind else grpc
    if "threads" in kind:
        server = package.server(ThreadPoolExecutor(8), options=options)
        _add(server, lambda request, context: request)
        server.add_insecure_port(address)
        server.start()
        print("ready", flush=True)
        server.wait_for_termination()
        return 0
    _runner(loop)(_serve_aio(kind, address, options))
    return 0


async def _serve_aio(kind: str, address: str, options: list[tuple[str, int]]) -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    name = "pygrpc_native.aio" if "native" in kind else "grpc.aio"
    server = importlib.import_module(name).server(options=options)
    _add(server, echo)
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def _add(server: Any, echo: Callable[[bytes, Any], Any]) -> None:
    _, service, method = METHOD.split("/")
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )


async def _call(address: str, num_channels: int, num_calls: int) -> dict[str, float]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_channels)]
    calls: list[Any] = [channel.unary_unary(METHOD) for channel in channels]
    request = b"." * NUM_BYTES

    async def work(number: int, total: int) -> list[float]:
        """`number` at a time; seconds of each."""
        took_s: list[float] = []
        left = iter(range(total))

        async def keep_calling() -> None:
            for each in left:
                began_s = time.perf_counter()
                await calls[each % num_channels](request)
                took_s.append(time.perf_counter() - began_s)

        await asyncio.gather(*(keep_calling() for _ in range(number)))
        return took_s

    await work(8, WARM_UP)
    alone_s = statistics.quantiles(await work(1, num_calls // 2), n=100)
    found = {"alone p50 us": alone_s[49] * 1e6, "p99 us": alone_s[98] * 1e6}
    for number in IN_FLIGHT:
        print(f"begin {number}", flush=True)
        await asyncio.sleep(0.05)
        began_s, spent_s = time.perf_counter(), time.process_time()
        await work(number, num_calls)
        found[f"calls/s at {number}"] = num_calls / (time.perf_counter() - began_s)
        found[f"client us at {number}"] = (time.process_time() - spent_s) / num_calls * 1e6
        print(f"end {number}", flush=True)
        await asyncio.sleep(0.05)
    for channel in channels:
        await channel.close()
    return found


def _runner(loop: str) -> Callable[[Any], Any]:
    if loop == "asyncio":
        return asyncio.run
    uvloop: Any = importlib.import_module("uvloop")
    return uvloop.run  # type: ignore[no-any-return]


def _spend(pids: Sequence[int]) -> float:
    """CPU seconds so far, of all threads: clock_getcpuclockid(3), which Python lacks."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    raise SystemExit(main())

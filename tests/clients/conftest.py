from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from services.core.tenants import hash_key, new_key
from tests.clients.edges import HttpEdge, run_http_edge

SIMULATED = ("--engine", "simulated", "--workers", "1")


class KeyedEdge(NamedTuple):
    """An edge that wants to know who is calling. One of its callers may do so once a second."""

    edge: HttpEdge
    key: str
    limited_key: str


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEdge]:
    """A simulated worker; nobody is asked who they are."""
    with run_http_edge(tmp_path_factory.mktemp("edge"), *SIMULATED) as edge:
        yield edge


@pytest.fixture(scope="module")
def keyed_edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedEdge]:
    key, limited_key = new_key(), new_key()
    settings = (
        f"tenants.free.key_hashes={hash_key(key)}",
        f"tenants.limited.key_hashes={hash_key(limited_key)}",
        "tenants.limited.requests_per_s=1",
        "tenants.limited.burst_requests=1",
    )
    options = [option for setting in settings for option in ("--set", setting)]
    with run_http_edge(tmp_path_factory.mktemp("edge"), *SIMULATED, *options) as edge:
        yield KeyedEdge(edge, key, limited_key)

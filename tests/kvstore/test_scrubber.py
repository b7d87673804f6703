from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore import scrubber as scrubber_module
from kvstore.memory_tier import MemoryTier
from kvstore.scrubber import Scrubber
from kvstore.tier2 import Record
from services.core.kvblocks import HEADER_BYTES
from tests.kvstore.blocks import NUM_BYTES, make_chain
from tests.kvstore.test_memory_tier import put
from tests.runtime.waiting import eventually

CHAIN = make_chain("a", 4)


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    capacity_bytes = 8 * (HEADER_BYTES + -(-NUM_BYTES // 64) * 64)
    tier = MemoryTier(capacity_bytes=capacity_bytes, policy="lru", max_tenant_share=1.0)
    put(tier, CHAIN)
    yield tier
    tier.check_integrity()
    tier.close()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
async def scrubber(tier: MemoryTier, thread: ThreadPoolExecutor) -> AsyncIterator[Scrubber]:
    async with Scrubber(tier, thread) as scrubber:
        yield scrubber


def record_of(tier: MemoryTier, index: int) -> Record:
    entry = tier.index.find(CHAIN.keys[index])
    assert entry is not None
    assert entry.record is not None
    return entry.record


def damage(tier: MemoryTier, index: int) -> None:
    tier.arena.view(tier.index.slot_of(CHAIN.keys[index]), NUM_BYTES)[99] ^= 1


async def test_a_damaged_block_leaves_and_sound_ones_stay(
    tier: MemoryTier, scrubber: Scrubber
) -> None:
    damage(tier, 1)
    for index in range(4):
        scrubber.look_at(record_of(tier, index))
    await eventually(lambda: tier.counters.rejected["checksum"])

    assert [tier.index.find(key) is not None for key in CHAIN.keys] == [True, False, True, True]


async def test_a_block_is_looked_at_once_in_a_while(
    tier: MemoryTier,
    scrubber: Scrubber,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scrubber.look_at(record_of(tier, 0))
    await eventually(lambda: not scrubber.num_waiting)
    await asyncio.wrap_future(thread.submit(int))  # it has looked
    damage(tier, 0)
    scrubber.look_at(record_of(tier, 0))
    assert scrubber.num_waiting == 0

    monkeypatch.setattr(scrubber_module, "INTERVAL_S", 0.0)
    scrubber.look_at(record_of(tier, 0))
    await eventually(lambda: tier.counters.rejected["checksum"] == 1)


async def test_a_block_that_left_meanwhile_is_not_counted(
    tier: MemoryTier, scrubber: Scrubber
) -> None:
    for index in range(4):
        damage(tier, index)
        scrubber.look_at(record_of(tier, index))
    tier.drop(CHAIN.keys)
    await eventually(lambda: not scrubber.num_waiting)
    await asyncio.sleep(0)

    assert not tier.counters.rejected


async def test_it_goes_on_when_the_arena_is_laid_out_anew_meanwhile(
    tier: MemoryTier, scrubber: Scrubber, thread: ThreadPoolExecutor
) -> None:
    may_look = threading.Event()
    thread.submit(may_look.wait, 30)
    scrubber.look_at(record_of(tier, 3))
    await eventually(lambda: not scrubber.num_waiting)
    tier.drop(CHAIN.keys)
    large = make_chain("large", 1, num_bytes=6 * NUM_BYTES)
    assert put(tier, large) == 1
    may_look.set()
    tier.arena.view(0, NUM_BYTES)[99] ^= 1
    entry = tier.index.find(large.keys[0])
    assert entry is not None
    assert entry.record is not None
    scrubber.look_at(entry.record)

    await eventually(lambda: tier.counters.rejected == {"checksum": 1})


async def test_only_so_many_wait_to_be_looked_at(
    tier: MemoryTier, scrubber: Scrubber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubber_module, "MAX_WAITING", 2)
    for index in range(4):
        scrubber.look_at(record_of(tier, index))

    assert scrubber.num_waiting == 2

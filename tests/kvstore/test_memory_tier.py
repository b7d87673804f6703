from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.memory_tier import MemoryTier
from kvstore.tier2 import Record, Wanted
from services.core.kvblocks import HEADER_BYTES, Bytes, checksum, read_generation
from services.runtime.sharing import SharedMemory
from tests.kvstore.blocks import FINGERPRINT, NUM_BYTES, Chain, as_arena, make_chain

NUM_SLOTS = 8
WANTED = Wanted(FINGERPRINT, NUM_BYTES)


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    capacity_bytes = NUM_SLOTS * (HEADER_BYTES + -(-NUM_BYTES // 64) * 64)
    tier = MemoryTier(capacity_bytes=capacity_bytes, policy="lru", max_tenant_share=1.0)
    yield tier
    tier.check_integrity()
    tier.close()
    tier.close()


@pytest.fixture
def memory(tier: MemoryTier) -> Iterator[Bytes]:
    """What any process of this user may write to."""
    shared = SharedMemory(tier.arena.fd)
    yield as_arena(shared.array)
    shared.close()


def put(tier: MemoryTier, chain: Chain, *, tenant: str = "") -> int:
    records = []
    for index, block in enumerate(chain.blocks):
        parent = chain.keys[index - 1] if index else b""
        place = tier.reserve(block, parent, tenant, chain.keys)
        if place is not None:
            tier.arena.write(place.slot, chain.datas[index])
            records.append(Record(block, tenant, checksum(chain.datas[index])))
    tier.publish(records)
    tier.tell()
    return len(records)


def test_a_block_is_found_and_copied(tier: MemoryTier) -> None:
    chain = make_chain("a", 2)
    put(tier, chain, tenant="t")
    record = tier.find(chain.keys[1], 1, WANTED)

    assert record == Record(chain.blocks[1], "t", checksum(chain.datas[1]))
    assert tier.copy(chain.keys[1], record) == chain.datas[1]
    assert tier.counters.bytes_written == 2 * NUM_BYTES


@pytest.mark.parametrize(
    ("chain_index", "wanted", "reason"),
    [
        (1, WANTED, "index"),
        (0, WANTED._replace(fingerprint=b"another engine"), "fingerprint"),
        (0, WANTED._replace(num_bytes=NUM_BYTES - 1), "size"),
    ],
)
def test_a_reader_that_wants_another_block_is_not_given_this_one_and_leaves_it(
    tier: MemoryTier, chain_index: int, wanted: Wanted, reason: str
) -> None:
    chain = make_chain("a", 1)
    put(tier, chain)

    assert tier.find(chain.keys[0], chain_index, wanted) is None
    assert tier.mismatch(chain.keys[0], chain_index, wanted) == reason
    assert tier.find(chain.keys[0], 0, WANTED) is not None
    assert tier.mismatch(chain.keys[0], 0, WANTED) == ""


@pytest.mark.parametrize("position", range(0, 8 + 4 + 3 * 4 + 32 + 32 + 16 + 1 + 64, 7))
def test_a_header_with_a_flipped_bit_is_never_given(
    tier: MemoryTier, memory: Bytes, position: int
) -> None:
    chain = make_chain("a", 1)
    put(tier, chain)
    memory[0, position] ^= 1 << position % 8

    found = tier.find(chain.keys[0], 0, WANTED)

    # Nobody reads what follows a fingerprint.
    unused = position >= 8 + 4 + 3 * 4 + 32 + 32 + 16 + 1 + len(FINGERPRINT)
    assert (found is not None) == unused
    assert tier.counters.rejected == ({} if unused else {"header": 1})


def test_a_damaged_block_is_not_copied_and_leaves(tier: MemoryTier, memory: Bytes) -> None:
    chain = make_chain("a", 1)
    put(tier, chain)
    record = tier.find(chain.keys[0], 0, WANTED)
    assert record is not None
    memory[0, HEADER_BYTES + 11] ^= 1

    assert tier.copy(chain.keys[0], record) is None
    assert tier.counters.rejected == {"checksum": 1}
    assert tier.find(chain.keys[0], 0, WANTED) is None


def test_a_block_that_is_on_its_way_cannot_be_dropped(tier: MemoryTier) -> None:
    chain = make_chain("a", 1)
    assert tier.reserve(chain.blocks[0], b"", "") is not None

    assert tier.drop(chain.keys) == 0
    tier.release(chain.keys[0])
    assert tier.index.num_reserved == 0


def test_a_place_that_was_left_is_another_when_it_is_given_again(tier: MemoryTier) -> None:
    chain = make_chain("a", 1)
    places = []
    for _ in range(2 * NUM_SLOTS):
        place = tier.reserve(chain.blocks[0], b"", "")
        assert place is not None
        places.append(place)
        tier.release(chain.keys[0])

    assert len(set(places)) == 2 * NUM_SLOTS


def test_what_finds_no_room_is_counted_by_reason(tier: MemoryTier) -> None:
    chain = make_chain("a", NUM_SLOTS + 1)
    small = dataclasses.replace(make_chain("b", 1).blocks[0], num_bytes=NUM_BYTES // 2)
    huge = dataclasses.replace(small, num_bytes=1 << 30)
    assert tier.reserve(huge, b"", "") is None
    for block in chain.blocks:
        tier.reserve(block, b"", "")
    assert tier.reserve(small, b"", "") is None

    assert tier.counters.rejected == {"slot_size": 2, "no_room": NUM_SLOTS // 2 + 1}
    for key in chain.keys[: NUM_SLOTS // 2]:
        tier.release(key)


def test_blocks_of_another_size_are_taken_when_none_is_left(tier: MemoryTier) -> None:
    small, chain = make_chain("small", 4, num_bytes=NUM_BYTES // 2), make_chain("a", 3)
    large = make_chain("large", 1, num_bytes=2 * NUM_BYTES)
    assert tier.reserve(large.blocks[0], b"", "") is not None
    assert put(tier, chain) == 0
    tier.release(large.keys[0])

    assert put(tier, chain) == 3
    assert put(tier, small) == 0
    assert tier.drop(chain.keys[:2]) == 2
    assert put(tier, small) == 0
    with tier.feed.follow():
        assert tier.drop(chain.keys[2:]) == 1
        assert put(tier, small) == 4
        known = set(tier.feed.snapshot().keys)

    assert known == {block.prefix_key for block in small.blocks}
    assert tier.index.num_slots > NUM_SLOTS
    assert tier.counters.rejected == {"slot_size": 3 + 4 + 4}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"index": 1}, "index"),
        ({"num_tokens": 1}, "num_tokens"),
        ({"num_bytes": NUM_BYTES - 1}, "size"),
    ],
)
def test_another_block_of_the_same_key_makes_way(
    tier: MemoryTier, memory: Bytes, change: dict[str, Any], reason: str
) -> None:
    chain = make_chain("a", 1)
    block = chain.blocks[0]
    put(tier, chain._replace(blocks=(dataclasses.replace(block, **change),)))
    place = tier.lease(block.storage_key)
    tier.make_way(block)

    assert tier.counters.rejected == {reason: 1}
    assert tier.index.is_empty
    assert not tier.feed.keys
    assert read_generation(memory, place.slot) != place.generation
    put(tier, chain)
    tier.make_way(block)
    assert tier.find(block.storage_key, 0, WANTED) is not None


def test_a_block_that_is_on_its_way_does_not_make_way(tier: MemoryTier) -> None:
    block = make_chain("a", 1).blocks[0]
    assert tier.reserve(block, b"", "") is not None
    tier.make_way(dataclasses.replace(block, index=1))

    assert tier.index.num_reserved == 1
    tier.release(block.storage_key)


def test_a_full_tier_makes_room_and_says_what_went(tier: MemoryTier) -> None:
    old, new = make_chain("old", NUM_SLOTS // 2), make_chain("new", NUM_SLOTS // 2)
    put(tier, old)
    put(tier, new)
    newer = make_chain("newer", 2)
    with tier.feed.follow():
        before = set(tier.feed.snapshot().keys)
        assert put(tier, newer, tenant="t") == 2
        after = set(tier.feed.snapshot().keys)

    assert before - after == {block.prefix_key for block in old.blocks[2:]}
    assert after - before == {block.prefix_key for block in newer.blocks}
    assert tier.counters.num_evicted == 2
    assert tier.counters.by_tenant(tier.index.tenants())["t"].num_blocks == 2


def test_a_slot_keeps_its_bytes_to_itself(tier: MemoryTier) -> None:
    """Every slot is full, and each block is its own."""
    chains = [make_chain(f"{number}", 2) for number in range(NUM_SLOTS // 2)]
    for chain in chains:
        put(tier, chain)

    for chain in chains:
        for index, key in enumerate(chain.keys):
            record = tier.find(key, index, WANTED)
            assert record is not None
            assert tier.copy(key, record) == chain.datas[index]
    assert np.count_nonzero([tier.index.match(chain.keys) for chain in chains]) == NUM_SLOTS // 2

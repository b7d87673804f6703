from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.arena import Arena
from services.core.kvblocks import Bytes, Place, checksum, copy_block, read_header
from services.runtime.sharing import SharedMemory
from tests.kvstore.blocks import NUM_BYTES, as_arena, make_chain

NUM_SLOTS = 4
CHAIN = make_chain("a", 2)
BLOCK, DATA = CHAIN.blocks[0], CHAIN.datas[0]


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(NUM_SLOTS * (256 + -(-NUM_BYTES // 64) * 64))
    arena.lay_out(NUM_BYTES)
    yield arena
    arena.close()


def store(arena: Arena, slot: int) -> Place:
    place = arena.begin(slot)
    arena.write(slot, DATA)
    arena.publish(slot, BLOCK, checksum(DATA))
    return place


def test_a_layout_is_for_blocks_of_one_size() -> None:
    arena = Arena(100_000)

    assert not arena.is_laid_out
    assert arena.has_room_for(90_000)
    assert not arena.has_room_for(100_000)
    arena.lay_out(NUM_BYTES)
    assert arena.layout.num_slots == 9
    assert arena.takes(NUM_BYTES)
    assert not arena.takes(NUM_BYTES // 2)
    arena.close()


def test_a_block_comes_back_as_it_was_written(arena: Arena) -> None:
    store(arena, 1)
    into = np.empty(NUM_BYTES, dtype=np.uint8)

    assert arena.copy(1, BLOCK, into) == ""
    assert into.tobytes() == DATA
    assert arena.view(1, NUM_BYTES).tobytes() == DATA
    assert arena.header_is_whole(1, BLOCK, checksum(DATA))


def test_whoever_maps_the_memory_sees_the_block(arena: Arena) -> None:
    place = store(arena, 2)
    shared = SharedMemory(arena.fd)
    into = np.empty(NUM_BYTES, dtype=np.uint8)

    assert copy_block(as_arena(shared.array), place, BLOCK, into) == ""
    assert into.tobytes() == DATA
    shared.close()


def test_a_place_that_begins_anew_is_seen_by_whoever_knew_it(arena: Arena) -> None:
    place = store(arena, 1)
    again = arena.begin(1)
    shared = SharedMemory(arena.fd)
    memory: Bytes = as_arena(shared.array)
    into = np.empty(NUM_BYTES, dtype=np.uint8)

    assert again == Place(1, place.generation + 1)
    assert copy_block(memory, place, BLOCK, into) == "generation"
    assert copy_block(memory, again, BLOCK, into) == "header"
    assert read_header(memory, 1) is None
    shared.close()


def test_generations_do_not_come_from_the_memory_that_others_write_to(arena: Arena) -> None:
    place = store(arena, 1)
    shared = SharedMemory(arena.fd)
    as_arena(shared.array)[1, :8] = 255
    shared.close()

    assert arena.place(1) == place
    assert not arena.header_is_whole(1, BLOCK, checksum(DATA))
    assert arena.begin(1).generation == place.generation + 1


def test_bytes_that_have_changed_do_not_verify(arena: Arena) -> None:
    store(arena, 0)
    assert arena.verify(0, NUM_BYTES, checksum(DATA))
    arena.view(0, NUM_BYTES)[5] ^= 4

    assert not arena.verify(0, NUM_BYTES, checksum(DATA))
    assert arena.copy(0, BLOCK, np.empty(NUM_BYTES, dtype=np.uint8)) == "checksum"


@pytest.mark.parametrize("num_bytes", [NUM_BYTES // 3, 3 * NUM_BYTES])
def test_no_place_of_an_older_layout_is_met_again(arena: Arena, num_bytes: int) -> None:
    shared = SharedMemory(arena.fd)
    old = [store(arena, slot) for slot in range(NUM_SLOTS) for _ in range(slot + 1)]
    for slot in range(NUM_SLOTS):
        arena.begin(slot)
    arena.lay_out(num_bytes)
    new = [arena.begin(slot) for slot in range(arena.layout.num_slots)]
    into = np.empty(NUM_BYTES, dtype=np.uint8)

    assert not set(old) & set(new)
    assert min(each.generation for each in new) > max(each.generation for each in old)
    assert all(copy_block(as_arena(shared.array), place, BLOCK, into) for place in old)
    shared.close()


def test_laying_out_takes_no_longer_for_small_blocks() -> None:
    arena = Arena(1 << 40)
    arena.lay_out(1)

    assert arena.layout.num_slots > 1 << 31
    assert arena.begin(arena.layout.num_slots - 1).generation == 1
    arena.close()


def test_an_arena_is_laid_out_for_blocks_that_fit() -> None:
    arena = Arena(1000)
    with pytest.raises(AssertionError):
        arena.lay_out(1000)
    arena.close()


def test_closing_leaves_others_what_they_have_mapped(arena: Arena) -> None:
    place = store(arena, 3)
    shared = SharedMemory(arena.fd)
    arena.close()
    arena.close()
    into = np.empty(NUM_BYTES, dtype=np.uint8)

    assert copy_block(as_arena(shared.array), place, BLOCK, into) == ""
    shared.close()

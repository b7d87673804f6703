from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from services.core.kvblocks import (
    HEADER_BYTES,
    ArenaLayout,
    Block,
    Bytes,
    Place,
    SlotHeader,
    checksum,
    clear_header,
    copy_block,
    payload,
    read_header,
    write_header,
)

NUM_BYTES = 1000
BLOCK = Block(b"k" * 32, b"p" * 32, b"f" * 20, 7, 64, NUM_BYTES)
SLOT = 2
GENERATION = 9
PLACE = Place(SLOT, GENERATION)


@pytest.fixture
def arena() -> Bytes:
    """Four slots; BLOCK lies in one of them."""
    layout = ArenaLayout.for_blocks(NUM_BYTES, 6000)
    arena = layout.arena(np.zeros(6000, dtype=np.uint8))
    data = np.arange(NUM_BYTES).astype(np.uint8)
    payload(arena, SLOT, NUM_BYTES)[:] = data
    write_header(arena, SLOT, SlotHeader(GENERATION, BLOCK, checksum(data)))
    return arena


def copy(arena: Bytes, expected: Block = BLOCK, place: Place = PLACE) -> str:
    return copy_block(arena, place, expected, np.empty(NUM_BYTES, dtype=np.uint8))


def test_a_slot_is_a_header_and_an_aligned_payload() -> None:
    layout = ArenaLayout.for_blocks(NUM_BYTES, 6000)

    assert layout == ArenaLayout(num_slots=4, slot_bytes=HEADER_BYTES + 1024)


def test_the_checksum_is_xxh3_128_big_endian() -> None:
    assert checksum(b"kv") == xxhash.xxh3_128(b"kv").intdigest().to_bytes(16, "big")


def test_a_header_reads_as_it_was_written(arena: Bytes) -> None:
    header = read_header(arena, SLOT)

    assert header is not None
    assert header.block == BLOCK
    assert header.generation == GENERATION
    assert read_header(arena, 0) is None


def test_a_block_is_copied_whole(arena: Bytes) -> None:
    into = np.zeros(NUM_BYTES, dtype=np.uint8)

    assert copy_block(arena, PLACE, BLOCK, into) == ""
    assert into.tobytes() == payload(arena, SLOT, NUM_BYTES).tobytes()


@pytest.mark.parametrize(
    ("reason", "field", "value"),
    [
        ("key", "storage_key", b"x" * 32),
        ("prefix_key", "prefix_key", b"x" * 32),
        ("fingerprint", "fingerprint", b"f" * 21),
        ("index", "index", 8),
        ("num_tokens", "num_tokens", 63),
        ("size", "num_bytes", NUM_BYTES - 1),
    ],
)
def test_another_block_than_the_expected_one_is_a_miss(
    arena: Bytes, reason: str, field: str, value: Any
) -> None:
    assert copy(arena, dataclasses.replace(BLOCK, **{field: value})) == reason


def test_a_place_outside_the_arena_is_a_miss(arena: Bytes) -> None:
    assert copy(arena, place=Place(4, GENERATION)) == "place"
    assert copy(arena, place=Place(-2, GENERATION)) == "place"


def test_an_array_of_another_size_is_a_miss(arena: Bytes) -> None:
    into = np.empty(NUM_BYTES + 1, dtype=np.uint8)

    assert copy_block(arena, PLACE, BLOCK, into) == "size"


def test_a_slot_that_was_reused_is_a_miss(arena: Bytes) -> None:
    clear_header(arena, SLOT, GENERATION + 1)

    assert copy(arena) == "generation"
    assert copy(arena, place=Place(SLOT, GENERATION + 1)) == "header"


def test_a_slot_reused_during_the_copy_is_a_miss(
    arena: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_late(into: Bytes, data: Bytes) -> None:
        into[:] = data
        clear_header(arena, SLOT, GENERATION + 1)

    monkeypatch.setattr(np, "copyto", copy_late)

    assert copy(arena) == "generation"


@given(position=st.integers(0, HEADER_BYTES + NUM_BYTES - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_miss_or_changes_nothing(position: int, bit: int) -> None:
    layout = ArenaLayout.for_blocks(NUM_BYTES, 6000)
    arena = layout.arena(np.zeros(6000, dtype=np.uint8))
    data = np.arange(NUM_BYTES).astype(np.uint8)
    payload(arena, SLOT, NUM_BYTES)[:] = data
    write_header(arena, SLOT, SlotHeader(GENERATION, BLOCK, checksum(data)))

    arena[SLOT, position] ^= 1 << bit
    into = np.empty(NUM_BYTES, dtype=np.uint8)
    reason = copy_block(arena, PLACE, BLOCK, into)

    assert reason or into.tobytes() == data.tobytes()
    assert reason or position < HEADER_BYTES


def test_a_fingerprint_that_does_not_fit_is_refused(arena: Bytes) -> None:
    block = dataclasses.replace(BLOCK, fingerprint=b"f" * 65)

    with pytest.raises(ValueError, match="64 bytes"):
        write_header(arena, 0, SlotHeader(1, block, b"c" * 16))

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.kvstore.v1 import kvstore_pb2
from services.core.kvblocks import ArenaLayout, Block, Bytes, SlotHeader, checksum, payload
from services.core.kvblocks import write_header as write
from worker.copying import Copier, copy_blocks

NUM_BYTES = 256
BLOCK = Block(b"s" * 32, b"p" * 32, b"fingerprint", 3, 16, NUM_BYTES)


def data(seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, NUM_BYTES).astype(np.uint8)


def arena_with_block() -> Bytes:
    layout = ArenaLayout.for_blocks(NUM_BYTES, 4096)
    arena = layout.arena(np.zeros(4096, np.uint8))
    payload(arena, 1, NUM_BYTES)[:] = data()
    write(arena, 1, SlotHeader(5, BLOCK, checksum(data())))
    return arena


def as_bytes(sent: bytes, **changed: object) -> kvstore_pb2.GetResponse:
    header = kvstore_pb2.BlockHeader(
        storage_key=BLOCK.storage_key,
        prefix_key=BLOCK.prefix_key,
        fingerprint=BLOCK.fingerprint,
        index=BLOCK.index,
        num_tokens=BLOCK.num_tokens,
        num_bytes=BLOCK.num_bytes,
        checksum=checksum(data()),
    )
    header.MergeFrom(kvstore_pb2.BlockHeader(**changed))  # type: ignore[arg-type]
    return kvstore_pb2.GetResponse(index=3, header=header, data=sent)


def in_arena(slot: int, generation: int) -> kvstore_pb2.GetResponse:
    place = kvstore_pb2.Place(slot=slot, generation=generation)
    return kvstore_pb2.GetResponse(index=3, mapped=place)


def copy(found: kvstore_pb2.GetResponse, arena: Bytes | None = None) -> tuple[str, Bytes]:
    into = np.zeros(NUM_BYTES, np.uint8)
    [reason] = copy_blocks(arena, [found], [BLOCK], [into])
    return reason, into


def test_a_block_is_copied_out_of_the_arena_and_out_of_a_message() -> None:
    for reason, into in (
        copy(in_arena(1, 5), arena_with_block()),
        copy(as_bytes(data().tobytes())),
    ):
        assert reason == ""
        assert np.array_equal(into, data())


REFUSED = {
    "missing": kvstore_pb2.GetResponse(index=3),
    "generation": in_arena(1, 4),
    "header": in_arena(2, 0),
    "place": in_arena(99, 5),
    "checksum": as_bytes(data(1).tobytes()),
    "size": as_bytes(data().tobytes()[:-1]),
    "key": as_bytes(data().tobytes(), storage_key=b"t" * 32),
    "fingerprint": as_bytes(data().tobytes(), fingerprint=b"another"),
    "index": as_bytes(data().tobytes(), index=4),
}


@pytest.mark.parametrize(("reason", "found"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_verify_is_refused_by_name(
    reason: str, found: kvstore_pb2.GetResponse
) -> None:
    assert copy(found, arena_with_block())[0] == reason


def test_an_empty_message_is_no_block() -> None:
    assert copy(as_bytes(b""))[0] == "size"


def test_a_place_without_an_arena_is_refused() -> None:
    assert copy(in_arena(1, 5))[0] == "place"


@given(st.integers(0, NUM_BYTES * 8 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    damaged = bytearray(data().tobytes())
    damaged[bit // 8] ^= 1 << bit % 8

    assert copy(as_bytes(bytes(damaged)))[0] == "checksum"


async def test_a_cancelled_copy_is_over_only_when_its_thread_is() -> None:
    begun, released = threading.Event(), threading.Event()
    over: list[bool] = []

    def work() -> None:
        begun.set()
        assert released.wait(10)

    async with Copier() as copier:
        task = asyncio.create_task(copier.run(work, on_failure=lambda: over.append(True)))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        still_running = (copier.num_running, list(over))
        released.set()

    assert still_running == (1, [])
    assert copier.num_running == 0
    assert over == [True]


async def test_a_copy_that_fails_says_so() -> None:
    over: list[bool] = []

    def work() -> None:
        raise ValueError("no room")

    async with Copier() as copier:
        with pytest.raises(ValueError, match="no room"):
            await copier.run(work, on_failure=lambda: over.append(True))

    assert over == [True]

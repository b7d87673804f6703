from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore import writer as writer_module
from kvstore.eviction import Lru
from kvstore.memory_tier import MemoryTier
from kvstore.tier2 import Record
from kvstore.writer import Finished, NewBlock, State, Writer
from services.core.errors import InvalidArgument
from services.core.kvblocks import HEADER_BYTES, checksum
from tests.kvstore.blocks import NUM_BYTES, Chain, make_chain
from tests.runtime.waiting import eventually

NUM_SLOTS = 40


class Kept:
    """What went on to the tier below."""

    def __init__(self) -> None:
        self.blocks: list[tuple[list[bytes], int]] = []

    def keep(self, chain: Sequence[bytes], record: Record) -> None:
        self.blocks.append((list(chain), record.block.index))


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    capacity_bytes = NUM_SLOTS * (HEADER_BYTES + -(-NUM_BYTES // 64) * 64)
    tier = MemoryTier(capacity_bytes=capacity_bytes, policy="lru", max_tenant_share=1.0)
    yield tier
    assert tier.index.num_reserved == 0
    tier.check_integrity()
    tier.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def writer(tier: MemoryTier, threads: ThreadPoolExecutor, kept: Kept) -> Iterator[Writer]:
    writer = Writer(tier, threads, kept.keep)
    yield writer
    writer.release()
    writer.release()


def new(chain: Chain, start: int = 0) -> list[NewBlock]:
    return [NewBlock(block, "tenant") for block in chain.blocks[start:]]


def finished(chain: Chain, *indices: int) -> list[Finished]:
    return [
        Finished(chain.keys[index], checksum(chain.datas[index]), chain.datas[index])
        for index in indices
    ]


async def put(writer: Writer, chain: Chain, start: int = 0) -> None:
    writer.reserve(new(chain, start), chain.keys)
    await writer.commit(finished(chain, *range(start, len(chain.blocks))))


async def test_what_is_committed_goes_on_below_with_its_own_chain(
    tier: MemoryTier, writer: Writer, kept: Kept
) -> None:
    one, other = make_chain("one", 2), make_chain("other", 3)
    writer.reserve(new(one), one.keys)
    writer.reserve(new(other), other.keys)

    assert await writer.commit([*finished(other, 1, 0), *finished(one, 1, 0)]) == 4
    assert sorted(kept.blocks) == sorted(
        [(one.keys, 0), (one.keys, 1), (other.keys, 0), (other.keys, 1)]
    )
    assert tier.index.match(other.keys) == 2


async def test_a_commit_of_anything_not_reserved_takes_nothing(
    tier: MemoryTier, writer: Writer
) -> None:
    chain = make_chain("a", 3)
    writer.reserve(new(chain)[:2], chain.keys)

    for indices in ([0, 2], [0, 1, 1]):
        with pytest.raises(InvalidArgument):
            await writer.commit(finished(chain, *indices))

    assert tier.index.num_reserved == 2
    assert await writer.commit(finished(chain, 0, 1)) == 2


async def test_a_block_asked_for_twice_is_reserved_once(writer: Writer) -> None:
    chain = make_chain("a", 1)

    states = [each.state for each in writer.reserve(new(chain) * 2, chain.keys)]

    assert states == [State.RESERVED, State.PRESENT]


async def test_a_block_that_does_not_verify_frees_its_place(
    tier: MemoryTier, writer: Writer, kept: Kept
) -> None:
    chain = make_chain("a", 3)
    writer.reserve(new(chain), chain.keys)
    wrong = [
        Finished(chain.keys[0], checksum(chain.datas[0]), chain.datas[1]),
        Finished(chain.keys[1], checksum(chain.datas[1]), chain.datas[1][1:]),
        Finished(chain.keys[2], checksum(chain.datas[2]), None),  # nothing lies in the arena
    ]

    assert await writer.commit(wrong) == 0
    assert tier.counters.rejected == {"checksum": 2, "size": 1}
    assert tier.index.num_blocks == tier.index.num_reserved == 0
    assert kept.blocks == []


async def test_places_of_a_commit_that_is_cut_off_are_free_when_its_thread_has_ended(
    tier: MemoryTier, threads: ThreadPoolExecutor, writer: Writer
) -> None:
    chain = make_chain("a", 2)
    go_on = threading.Event()
    threads.submit(go_on.wait, 60)  # it is busy
    writer.reserve(new(chain), chain.keys)
    committing = asyncio.create_task(writer.commit(finished(chain, 0, 1)))
    await asyncio.sleep(0)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    writer.release()

    assert tier.index.num_reserved == 2
    go_on.set()
    await eventually(lambda: tier.index.num_reserved == 0)
    assert tier.index.match(chain.keys) == 0


async def test_a_commit_outlives_whatever_is_evicted_meanwhile(
    tier: MemoryTier, threads: ThreadPoolExecutor, writer: Writer, kept: Kept
) -> None:
    chain = make_chain("a", 2)
    go_on = threading.Event()
    threads.submit(go_on.wait, 60)
    writer.reserve(new(chain), chain.keys)
    committing = asyncio.create_task(writer.commit(finished(chain, 0, 1)))
    await asyncio.sleep(0)
    with ThreadPoolExecutor(1) as others:
        other = Writer(tier, others, kept.keep)
        for number in range(2 * NUM_SLOTS):
            await put(other, make_chain(f"{number}", 1))
        tier.drop(chain.keys)
    go_on.set()

    assert await committing == 2
    assert tier.index.match(chain.keys) == 2
    assert tier.counters.num_evicted == NUM_SLOTS + 2


class _TouchedLru(Lru):
    touched: list[bytes]

    def touch(self, key: bytes) -> None:
        self.touched.append(key)
        super().touch(key)


async def test_a_prompt_that_comes_piece_by_piece_is_one_use_of_its_beginning(
    tier: MemoryTier, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[bytes] = []
    monkeypatch.setattr(_TouchedLru, "touched", touched, raising=False)
    monkeypatch.setattr(tier, "_policy", _TouchedLru)
    chain = make_chain("a", 9)
    for length in (3, 6, 9):
        await put(writer, Chain(chain.blocks[:length], chain.datas[:length]), length - 3)
    assert touched == []

    # Later, another prompt goes on from there.
    monkeypatch.setattr(writer_module, "SAME_PROMPT_S", 0.0)
    await put(writer, make_chain("b", 7, onto=Chain(chain.blocks[:6], chain.datas[:6])), 6)

    assert touched == chain.keys[:6][::-1]

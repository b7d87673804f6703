"""Blocks that come beside a request, as the core takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.worker.tiers import config_of, prompt_of, until
from worker.engines.contract import Bytes
from worker.front import EngineFront
from worker.messages import Source, StagedBlock, Token
from worker.requests import Prompt
from worker.stream import TokenStream

BLOCK_TOKENS = 16
# 6 full blocks, and 4 tokens that are always computed.
PROMPT = prompt_of(1, 100, max_tokens=4)
LONG = prompt_of(2, 40, max_tokens=200)


class Computed:
    """What a worker that is gone made of PROMPT."""

    def __init__(self, answer: list[int], blocks: list[Bytes]) -> None:
        self.answer = answer
        self.blocks = blocks


@pytest.fixture
async def computed() -> Computed:
    places: list[int] = []
    async with EngineFront(config_of(), cores_shared_by=1) as front:
        front.on_stored(lambda stored: places.extend(block.place for block in stored))
        with front.submit(PROMPT) as stream:
            answer = await read(stream)
        await until(lambda: len(places) == 6)
        return Computed(answer, [front.arena.pool[place].copy() for place in places])


@pytest.fixture
async def front() -> AsyncIterator[EngineFront]:
    async with EngineFront(config_of(num_slots=1), cores_shared_by=1) as front:
        yield front
        await until(lambda: not front.num_held)
        assert front.inbox.num_free == front.inbox.num_slots


async def read(stream: TokenStream) -> list[int]:
    tokens: list[Token] = []
    while not tokens or not tokens[-1].finish:
        tokens += (await stream.next()).tokens
    return [token.token_id for token in tokens]


def stage(
    front: EngineFront, stream: TokenStream, computed: Computed, *indices: int, flush: bool = False
) -> None:
    slots = front.inbox.acquire_now(len(indices))
    for index, slot in zip(indices, slots, strict=True):
        front.arena.inbox[slot][:] = computed.blocks[index]
    pairs = zip(indices, slots, strict=True)
    stream.stage([StagedBlock(index, slot, BLOCK_TOKENS) for index, slot in pairs], flush=flush)


async def run_to_end(front: EngineFront, prompt: Prompt) -> list[int]:
    with front.submit(prompt) as stream:
        return await read(stream)


@pytest.mark.parametrize("indices", [(0, 1, 2), (3, 4, 5), (1, 4)])
async def test_blocks_that_came_before_a_request_had_its_slot_are_joined(
    front: EngineFront, computed: Computed, indices: tuple[int, ...]
) -> None:
    running = asyncio.create_task(run_to_end(front, LONG))
    await until(lambda: front.hub.load.num_running == 1)
    with front.submit(PROMPT, source=Source.JOIN) as stream:
        stage(front, stream, computed, *indices)
        stream.loading_ended()
        answer = await asyncio.wait_for(read(stream), 20)
    await running
    await until(lambda: front.hub.load.num_running == 0)

    assert answer == computed.answer
    assert front.hub.load.prompt_tokens_evaluated == 40 + 100 - BLOCK_TOKENS * len(indices)


async def test_blocks_that_the_pool_has_got_meanwhile_are_dropped(
    front: EngineFront, computed: Computed
) -> None:
    running = asyncio.create_task(run_to_end(front, LONG))
    await until(lambda: front.hub.load.num_running == 1)
    first = asyncio.create_task(run_to_end(front, PROMPT))
    await until(lambda: front.hub.load.num_waiting == 1)
    with front.submit(PROMPT, source=Source.JOIN) as stream:
        stage(front, stream, computed, 0, 1)
        stream.loading_ended()
        answer = await asyncio.wait_for(read(stream), 20)

    assert answer == await first == computed.answer
    assert front.hub.load.prompt_tokens_evaluated == 40 + 100 + 4
    await running


async def test_a_request_that_is_held_takes_what_has_come_when_its_slots_are_needed(
    front: EngineFront, computed: Computed
) -> None:
    with front.submit(PROMPT, source=Source.HOLD) as stream:
        await stream.started()
        stage(front, stream, computed, 0, 1)
        stream.stage([], flush=True)
        await until(lambda: front.inbox.num_free == front.inbox.num_slots)
        stage(front, stream, computed, 2, 3, 4, 5)
        stream.loading_ended()
        answer = await asyncio.wait_for(read(stream), 20)

    assert answer == computed.answer
    await until(lambda: front.num_held == 0)
    assert front.hub.load.prompt_tokens_evaluated == 4


async def test_what_a_request_was_held_for_counts_as_load_though_it_computes_in_the_end(
    front: EngineFront,
) -> None:
    with front.submit(PROMPT, source=Source.HOLD) as stream:
        await stream.started()
        await asyncio.sleep(0.3)
        stream.compute()
        [token] = (await stream.next()).tokens[:1]

    assert token.first is not None
    assert token.first.kv_load_s >= 0.3

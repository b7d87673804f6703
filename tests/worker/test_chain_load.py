"""Blocks of one prompt that come beside its request, from a real KV store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from kvstore.node import KvStoreNode
from kvstore.redis_tier import RedisTier
from services.control.node import ControlNode
from services.core.settings import MeshConfig
from services.runtime.tasks import end_tasks
from tests.kvstore.redis_servers import url_of, valkey
from tests.worker.tiers import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    NUM_TOKENS,
    Worker,
    config_of,
    fill,
    prompt_of,
    until,
    working,
)
from worker.chain_load import ChainLoad
from worker.loading import Decision
from worker.planner import PROBE_BLOCKS

# Of a block in Redis, header included, about.
BLOCK_BYTES = 4400
# Runs until it is cancelled.
LONG = prompt_of(99, 50, max_tokens=1900)


@asynccontextmanager
async def busy(worker: Worker) -> AsyncIterator[None]:
    """Its only slot is taken."""
    running = asyncio.create_task(worker.generate(LONG))
    try:
        await until(lambda: worker.front.hub.load.num_running == 1)
        yield
    finally:
        await end_tasks([running])


# --- through an inbox that is smaller than the prompt


async def test_a_chain_longer_than_the_inbox_is_loaded_whole(
    control: ControlNode, store: KvStoreNode
) -> None:
    computed = await fill(control, 1)
    async with working(config_of(num_inbox_blocks=4), control.address) as worker:
        answer = await worker.generate(prompt_of(1))

    assert [answer.token_ids] == computed
    assert answer.load.loaded_blocks == NUM_BLOCKS
    assert answer.first.cached_tokens == NUM_BLOCKS * BLOCK_TOKENS


async def test_chains_that_share_a_small_inbox_are_all_loaded_whole(
    control: ControlNode, store: KvStoreNode
) -> None:
    names = range(4)
    computed = await fill(control, *names)
    async with working(config_of(num_inbox_blocks=4), control.address) as worker:
        answers = await asyncio.gather(*(worker.generate(prompt_of(name)) for name in names))

    assert [answer.token_ids for answer in answers] == computed
    assert [answer.load.loaded_blocks for answer in answers] == [NUM_BLOCKS] * 4


# --- while the request waits for a slot


@pytest.mark.parametrize(
    ("slot_s", "computing_s", "hidden"),
    [
        (13.0, 11.0, (3.0, 1.0)),  # not to be held, and not begun for lack of a slot
        (11.0, 13.0, (1.0, 1.0)),
        (math.inf, 11.0, (4.0, 0.0)),
        (11.0, math.inf, (1.0, 0.0)),
    ],
)
def test_no_moment_of_a_load_is_hidden_twice(
    slot_s: float, computing_s: float, hidden: tuple[float, float]
) -> None:
    load = object.__new__(ChainLoad)
    load._reader = Mock(num_staged=5, staged_s=14.0)
    load._began_s, load._slot_s, load._computing_s = 10.0, slot_s, computing_s

    assert (load.prefetch_s, load.overlap_s) == hidden


async def test_blocks_come_while_a_request_waits_for_a_slot(
    control: ControlNode, store: KvStoreNode
) -> None:
    computed = await fill(control, 1)
    async with working(config_of(num_slots=1), control.address) as worker:
        async with busy(worker):
            waiting = asyncio.create_task(worker.generate(prompt_of(1)))
            await until(lambda: worker.tier.stats.blocks_loaded > 0)
            await until(lambda: worker.front.hub.load.num_waiting == 1)
        answer = await waiting

    assert [answer.token_ids] == computed
    assert answer.load.loaded_blocks == NUM_BLOCKS


async def test_those_that_wait_leave_room_in_the_inbox_for_those_that_run(
    control: ControlNode, store: KvStoreNode
) -> None:
    names = range(4)
    computed = await fill(control, *names)
    config = config_of(num_slots=1, num_inbox_blocks=8)
    async with working(config, control.address) as worker:
        async with busy(worker):
            waiting = [asyncio.create_task(worker.generate(prompt_of(name))) for name in names]
            await until(lambda: worker.tier.stats.blocks_loaded == 4)
            num_free = worker.front.inbox.num_free
        answers = [await task for task in waiting]

    assert num_free == 4
    assert [answer.token_ids for answer in answers] == computed


async def test_waiting_for_a_slot_does_not_count_toward_the_timeout_of_a_load() -> None:
    config = config_of(kv_load="always", kv_load_timeout_ms=400.0, num_slots=1, num_inbox_blocks=4)
    async with ControlNode(config=config) as control, KvStoreNode(control=control.address):
        computed = await fill(control, 1, config=config)
        async with working(config, control.address) as worker:
            async with busy(worker):
                waiting = asyncio.create_task(worker.generate(prompt_of(1)))
                await until(lambda: worker.tier.stats.blocks_loaded > 0)
                await asyncio.sleep(0.6)
            answer = await waiting

    assert [answer.token_ids] == computed
    assert answer.load.loaded_blocks == NUM_BLOCKS


async def test_the_loads_of_a_request_cancelled_while_it_waits_end(
    control: ControlNode, store: KvStoreNode
) -> None:
    await fill(control, 1)
    config = config_of(num_slots=1, num_inbox_blocks=8)
    async with working(config, control.address) as worker, busy(worker):
        waiting = asyncio.create_task(worker.generate(prompt_of(1)))
        await until(lambda: worker.tier.stats.blocks_loaded == 4)
        await end_tasks([waiting])
        await until(lambda: worker.front.inbox.num_free == 8)

        assert worker.tier.stats.num_loads == 0
        assert worker.tier.stats.blocks_loaded == 4


# --- out of Redis


class Below(NamedTuple):
    """A KV store that has nothing in node memory, and a Redis that has it all."""

    control: ControlNode
    store: KvStoreNode
    computed: list[list[int]]

    @property
    def redis(self) -> RedisTier:
        assert isinstance(self.store.store.tier2, RedisTier)
        return self.store.store.tier2


@asynccontextmanager
async def below(*, bytes_per_s: float = 0.0, config: MeshConfig) -> AsyncIterator[Below]:
    """With the prompts 1 and 2, read no faster than `bytes_per_s`."""
    async with ControlNode(config=config) as control:
        async with KvStoreNode(control=control.address):
            computed = await fill(control, 1, 2, config=config)
        async with KvStoreNode(control=control.address) as store:
            under = Below(control, store, computed)
            under.redis.throttle(bytes_per_s)
            yield under


def over_redis(url: str, *, prefill_tokens_per_s: float = 4000.0, kv_load: str) -> MeshConfig:
    return config_of(
        kvstore={"redis_url": url, "redis_retry_s": 0.05},
        simulated={"prefill_tokens_per_s": prefill_tokens_per_s},
        kv_load=kv_load,
        kv_load_timeout_ms=30_000.0,
    )


async def test_what_only_redis_has_is_loaded() -> None:
    with valkey() as server:
        config = over_redis(url_of(server), kv_load="always")
        async with (
            below(config=config) as under,
            working(config, under.control.address) as worker,
        ):
            answer = await worker.generate(prompt_of(1))
            stats = worker.tier.stats

    assert answer.token_ids == under.computed[0]
    assert answer.load.loaded_blocks == NUM_BLOCKS
    assert stats.blocks_loaded_from_l2 == NUM_BLOCKS


async def test_the_head_is_computed_while_the_tail_is_loaded() -> None:
    """Both take about a second for all blocks, and a step a fifth of that."""
    with valkey() as server:
        config = over_redis(url_of(server), prefill_tokens_per_s=400, kv_load="auto")
        async with (
            below(bytes_per_s=25 * BLOCK_BYTES, config=config) as under,
            working(config, under.control.address) as worker,
        ):
            await worker.generate(prompt_of(3))  # the engine is measured
            answer = await worker.generate(prompt_of(1))
            stats = worker.tier.stats

    load = answer.load
    assert answer.token_ids == under.computed[0]
    assert load.decision is Decision.BOTH
    assert "loaded and computed at once" in load.reason
    assert 0 < load.tail_blocks < NUM_BLOCKS
    assert BLOCK_TOKENS < answer.first.evaluated_prompt_tokens < NUM_TOKENS
    assert answer.first.cached_tokens + answer.first.evaluated_prompt_tokens == NUM_TOKENS
    assert load.expected_load_ms > 0
    assert load.expected_compute_ms > 0
    assert stats.num_both == 1


async def test_a_redis_that_is_too_slow_is_left_alone() -> None:
    with valkey() as server:
        config = over_redis(url_of(server), kv_load="auto")
        async with (
            below(bytes_per_s=BLOCK_BYTES, config=config) as under,
            working(config, under.control.address) as worker,
        ):
            await worker.generate(prompt_of(3))
            # The first learns how slow it is, in less time than computing takes.
            answers = [await worker.generate(prompt_of(name)) for name in (1, 2)]

    assert [answer.token_ids for answer in answers] == under.computed
    assert answers[0].load.reason.startswith("4 blocks loaded to learn how fast L2 is; ")
    assert answers[1].load.decision is Decision.COMPUTE
    for answer in answers:
        assert answer.load.expected_load_ms > answer.load.expected_compute_ms > 0
        assert answer.load.loaded_blocks <= PROBE_BLOCKS


async def test_the_load_of_a_cancelled_request_stops_at_the_redis() -> None:
    with valkey() as server:
        config = over_redis(url_of(server), kv_load="always")
        async with (
            below(bytes_per_s=5 * BLOCK_BYTES, config=config) as under,
            working(config, under.control.address) as worker,
        ):
            loading = asyncio.create_task(worker.generate(prompt_of(1)))
            await until(lambda: worker.tier.stats.blocks_loaded > 0)
            await end_tasks([loading])
            await worker.settled()
            read = under.redis.stats.bytes_read
            await asyncio.sleep(0.5)

            assert under.redis.stats.bytes_read == read < NUM_BLOCKS * BLOCK_BYTES / 2


async def test_how_a_load_went_is_told_though_the_answer_ends_before_it() -> None:
    """The tail is still under way when the engine has computed everything."""
    with valkey() as server:
        config = over_redis(url_of(server), kv_load="auto")
        async with (
            below(bytes_per_s=BLOCK_BYTES, config=config) as under,
            working(config, under.control.address) as worker,
        ):
            await worker.generate(prompt_of(3))
            await worker.generate(prompt_of(1, max_tokens=1))
            answer = await worker.generate(prompt_of(2, max_tokens=1))
            stats = worker.tier.stats

    assert answer.load.decision is Decision.COMPUTE
    assert answer.load.missing_blocks == NUM_BLOCKS
    assert stats.num_probes >= 2  # it read beside the computing, to learn
    assert stats.spent_ms > 0

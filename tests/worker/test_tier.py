"""Workers with a real KV store: the simulated engine, whose answers follow from its KV."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvstore.node import KvStoreNode
from kvstore.tier2 import Record
from services.control.node import ControlNode
from services.core.config import MeshConfig
from services.core.errors import Unavailable
from services.core.kvblocks import Bytes
from services.runtime.sharing import SharedMemory
from tests.kvstore.redis_servers import url_of, valkey
from tests.runtime.processes import Running, running
from tests.worker.tiers import BLOCK_TOKENS, config_of, core_pid, prompt_of, until, working
from worker import store_client
from worker.loading import Decision

CONFIG = config_of()
# 25 full blocks, and 3 tokens that are always computed.
NUM_TOKENS = 403


@pytest.fixture
async def control() -> AsyncIterator[ControlNode]:
    async with ControlNode(config=CONFIG) as node:
        yield node


@pytest.fixture
async def store(control: ControlNode) -> AsyncIterator[KvStoreNode]:
    async with KvStoreNode(control=control.address) as node:
        yield node
        await until(lambda: node.store.tier1.index.num_reserved == 0)


async def fill(control: ControlNode, *names: int, config: MeshConfig = CONFIG) -> list[list[int]]:
    """Answers of a worker that is gone afterwards; what it computed is in the store."""
    async with working(config, control.address) as worker:
        return [(await worker.generate(prompt_of(name))).token_ids for name in names]


def memory_of(store: KvStoreNode) -> Bytes:
    """What any process of this user may write to."""
    return SharedMemory(store.store.tier1.arena.fd).array


async def test_what_one_worker_computed_the_next_one_loads(
    control: ControlNode, store: KvStoreNode
) -> None:
    [computed] = await fill(control, 1)
    async with working(CONFIG, control.address) as worker:
        loaded = await worker.generate(prompt_of(1))
        stats = worker.tier.stats

    assert loaded.token_ids == computed
    assert loaded.first.cached_tokens == 400
    assert loaded.first.evaluated_prompt_tokens == 3
    assert loaded.load.decision is Decision.LOAD
    assert (loaded.load.missing_blocks, loaded.load.loaded_blocks) == (25, 25)
    assert loaded.load.load_ms > 0
    assert stats.blocks_loaded == 25
    # What came out of the store, and is in the pool now, is not written again.
    assert stats.blocks_stored == 0
    assert not stats.rejected


async def test_a_store_on_another_host_is_used_over_grpc(
    control: ControlNode, store: KvStoreNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(name: str) -> SharedMemory:
        raise OSError("no such socket on this host")

    monkeypatch.setattr(store_client, "open_shared", refuse)
    [computed] = await fill(control, 1)
    async with working(CONFIG, control.address) as second:
        loaded = await second.generate(prompt_of(1))

    assert loaded.token_ids == computed
    assert loaded.load.loaded_blocks == 25


async def test_the_blocks_of_an_answer_are_written_too_and_count_for_the_tenant(
    control: ControlNode, store: KvStoreNode
) -> None:
    prompt = prompt_of(1, 100, max_tokens=40)
    async with working(CONFIG, control.address) as first:
        await first.generate(prompt, tenant="acme")
        await first.settled()
        stored = first.tier.stats.blocks_stored
    tier1 = store.store.tier1

    assert stored == (100 + 39) // BLOCK_TOKENS
    assert tier1.index.tenants() == {"acme": stored}


async def test_blocks_in_the_own_pool_are_not_loaded(
    control: ControlNode, store: KvStoreNode
) -> None:
    async with working(CONFIG, control.address) as worker:
        await worker.generate(prompt_of(1))
        await worker.settled()
        again = await worker.generate(prompt_of(1))

    assert again.first.cached_tokens == 400
    assert again.load.loaded_blocks == 0
    assert again.load.reason == "no block is missing"


async def test_without_a_store_requests_are_not_held() -> None:
    async with ControlNode(config=CONFIG) as control, working(CONFIG, control.address) as worker:
        prompt = prompt_of(1)
        may_load = worker.tier.may_load(NUM_TOKENS, prompt.prefix_keys)
        answer = await worker.generate(prompt)
        await worker.settled()
        stats = worker.tier.stats

    assert not may_load
    assert answer.load.reason == "there is no KV store"
    assert stats.blocks_stored == 0
    assert stats.dropped["no store"] == 26


async def test_loading_can_be_switched_off() -> None:
    config = config_of(kv_load="never")
    async with ControlNode(config=config) as control, KvStoreNode(control=control.address):
        await fill(control, 1, config=config)
        async with working(config, control.address) as worker:
            answer = await worker.generate(prompt_of(1))

    assert answer.first.cached_tokens == 0
    assert answer.load.reason == "worker.kv_load is never"


async def test_a_store_that_comes_later_or_comes_again_is_used(control: ControlNode) -> None:
    async with working(CONFIG, control.address) as worker:
        for name in (1, 2):
            async with KvStoreNode(control=control.address) as store:
                await until(lambda: worker.tier.may_load(NUM_TOKENS, prompt_of(9).prefix_keys))
                await worker.generate(prompt_of(name))
                await worker.settled()
                num_blocks = store.store.tier1.index.num_blocks
            await until(lambda: not worker.tier.may_load(NUM_TOKENS, prompt_of(9).prefix_keys))

            assert num_blocks == 26


# --- what was damaged


async def test_a_damaged_block_is_computed_and_what_is_before_it_is_used(
    control: ControlNode, store: KvStoreNode
) -> None:
    [computed] = await fill(control, 1)
    memory = memory_of(store)
    block = next(r.block for r in records_of(store) if r.block.index == 10)
    slot = store.store.tier1.index.slot_of(block.storage_key)
    slot_bytes = store.store.tier1.arena.layout.slot_bytes
    memory[slot * slot_bytes + 1000] ^= 1
    async with working(CONFIG, control.address) as worker:
        answer = await worker.generate(prompt_of(1))
        stats = worker.tier.stats

    assert answer.token_ids == computed
    assert stats.rejected == {"checksum": 1}
    assert answer.load.reason.endswith("ended after 10 blocks: checksum")
    assert answer.first.cached_tokens == 10 * BLOCK_TOKENS


@pytest.mark.parametrize("seed", range(4))
async def test_no_damage_whatever_makes_a_wrong_token(
    control: ControlNode, store: KvStoreNode, seed: int
) -> None:
    names = range(4)
    computed = await fill(control, *names)
    memory = memory_of(store)
    used = len(records_of(store)) * store.store.tier1.arena.layout.slot_bytes
    source = np.random.default_rng(seed)
    if seed % 2:
        memory[source.integers(0, used, 200)] ^= source.integers(1, 256, 200).astype(np.uint8)
    else:
        start = source.integers(0, used // 2)
        memory[start : start + used // 8] = source.integers(0, 256, used // 8).astype(np.uint8)
    async with working(CONFIG, control.address) as worker:
        answers = [(await worker.generate(prompt_of(name))).token_ids for name in names]

    assert answers == computed


def records_of(store: KvStoreNode) -> list[Record]:
    index = store.store.tier1.index
    found = [index.find(key) for key in index.keys(None)]
    return [entry.record for entry in found if entry is not None and entry.record is not None]


# --- what goes away


@pytest.fixture
async def store_process(control: ControlNode) -> AsyncIterator[Running]:
    async with running("kvstore", "--control", control.address) as process:
        yield process


async def test_a_store_that_is_killed_while_blocks_are_read_fails_nothing(
    control: ControlNode, store_process: Running
) -> None:
    names = range(3)
    computed = await fill(control, *names)
    async with working(CONFIG, control.address) as worker:
        answers = [asyncio.create_task(worker.generate(prompt_of(name))) for name in names]
        await until(lambda: worker.tier.stats.blocks_loaded > 0)
        store_process.send(signal.SIGKILL)
        done = [await answer for answer in answers]

    assert [answer.token_ids for answer in done] == computed


async def test_a_store_that_hangs_holds_no_request_longer_than_computing_takes(
    control: ControlNode, store_process: Running
) -> None:
    computed = await fill(control, 1, 2, 3)
    async with working(CONFIG, control.address) as worker:
        await worker.generate(prompt_of(3))
        store_process.send(signal.SIGSTOP)
        held = await worker.generate(prompt_of(1))
        not_held = await worker.generate(prompt_of(2))
        stats = worker.tier.stats
        store_process.send(signal.SIGCONT)
        await until(lambda: worker.tier.may_load(NUM_TOKENS, prompt_of(9).prefix_keys))
        # Not in the pool, and in the store.
        prompt_ids = await fill(control, 4)
        after = await worker.generate(prompt_of(4))

    assert [held.token_ids, not_held.token_ids] == computed[:2]
    assert "timeout" in held.load.reason
    assert not_held.load.reason == "the KV store does not answer"
    assert stats.failed == {"timeout": 1}
    assert [after.token_ids] == prompt_ids
    assert after.load.loaded_blocks == 25


async def test_a_worker_that_has_measured_nothing_waits_for_a_hung_store_to_its_timeout() -> None:
    config = config_of(kv_load_timeout_ms=300.0)
    async with (
        ControlNode(config=config) as control,
        running("kvstore", "--control", control.address) as process,
        working(config, control.address) as worker,
    ):
        process.send(signal.SIGSTOP)
        answer = await worker.generate(prompt_of(1))
        process.send(signal.SIGCONT)

    assert answer.load.reason.endswith("timeout")
    assert answer.first.kv_load_s >= 0.25


@pytest.mark.parametrize("seed", range(3))
async def test_requests_cancelled_at_any_moment_leave_nothing_behind(
    control: ControlNode, store: KvStoreNode, seed: int
) -> None:
    names = range(4)
    computed = await fill(control, *names)
    config = config_of(num_slots=2, simulated={"num_blocks": 80}, num_inbox_blocks=8)
    source = np.random.default_rng(seed)
    async with working(config, control.address) as worker:
        for waits_s in source.uniform(0, 0.06, (12, 3)):
            tasks = [
                asyncio.create_task(worker.generate(prompt_of(int(name))))
                for name in source.integers(0, len(names), 3)
            ]
            for task, wait_s in zip(tasks, sorted(waits_s), strict=True):
                await asyncio.sleep(wait_s / 3)
                task.cancel()
            await asyncio.wait(tasks)
        await worker.settled()
        answers = [(await worker.generate(prompt_of(name))).token_ids for name in names]

    assert answers == computed
    store.store.check_integrity()


async def test_an_engine_core_that_dies_under_a_load_leaves_nothing_behind(
    control: ControlNode, store: KvStoreNode
) -> None:
    [computed] = await fill(control, 1)
    async with working(CONFIG, control.address) as worker:
        answer = asyncio.create_task(worker.generate(prompt_of(1)))
        await until(lambda: worker.tier.stats.num_loads > 0)
        states: list[bool] = []
        worker.front.on_core(states.append)
        os.kill(core_pid(), signal.SIGKILL)
        await asyncio.wait([answer])
        await until(lambda: states == [False, True])
        await worker.settled()
        again = await worker.generate(prompt_of(1))

    assert isinstance(answer.exception(), Unavailable)
    assert again.token_ids == computed


# --- beside requests


async def test_blocks_come_while_a_request_waits_for_a_slot(
    control: ControlNode, store: KvStoreNode
) -> None:
    computed = await fill(control, 1)
    config = config_of(num_slots=1)
    async with working(config, control.address) as worker:
        running = asyncio.create_task(worker.generate(prompt_of(2, 50, max_tokens=400)))
        await until(lambda: worker.front.hub.load.num_running == 1)
        waiting = asyncio.create_task(worker.generate(prompt_of(1)))
        await until(lambda: worker.tier.stats.blocks_loaded > 0)
        await until(lambda: worker.front.hub.load.num_waiting == 1)
        answer = await waiting
        await running

    assert [answer.token_ids] == computed
    assert answer.load.loaded_blocks == 25


async def test_those_that_wait_leave_room_in_the_inbox_for_those_that_run(
    control: ControlNode, store: KvStoreNode
) -> None:
    names = range(4)
    computed = await fill(control, *names)
    config = config_of(num_slots=1, num_inbox_blocks=8)
    async with working(config, control.address) as worker:
        first = asyncio.create_task(worker.generate(prompt_of(9, 50, max_tokens=300)))
        await until(lambda: worker.front.hub.load.num_running == 1)
        waiting = [asyncio.create_task(worker.generate(prompt_of(name))) for name in names]
        await until(lambda: worker.tier.stats.blocks_loaded == 4)
        num_free = worker.front.inbox.num_free
        answers = [(await task).token_ids for task in waiting]
        await first

    assert num_free == 4
    assert answers == computed


async def test_blocks_for_which_the_queue_has_no_room_are_dropped_and_counted() -> None:
    config = config_of(kv_write_queue_blocks=5)
    async with (
        ControlNode(config=config) as control,
        KvStoreNode(control=control.address),
        working(config, control.address) as worker,
    ):
        await worker.generate(prompt_of(1, max_tokens=1))
        await worker.settled()
        stats = worker.tier.stats

    assert stats.blocks_stored == 5
    assert stats.dropped == {"queue full": 20}


async def test_a_block_that_was_overwritten_meanwhile_is_not_written(
    control: ControlNode, store_process: Running
) -> None:
    config = config_of(simulated={"num_blocks": 60})
    async with working(config, control.address) as worker:
        store_process.send(signal.SIGSTOP)
        computed = [(await worker.generate(prompt_of(name))).token_ids for name in range(4)]
        store_process.send(signal.SIGCONT)
        await worker.settled()
        stats = worker.tier.stats
    async with working(config, control.address) as worker:
        answers = [(await worker.generate(prompt_of(name))).token_ids for name in range(4)]

    assert stats.dropped["overwritten"] >= 16
    assert stats.blocks_stored > 0
    assert answers == computed


# --- Redis below


async def test_what_only_redis_has_is_loaded_or_met_half_way() -> None:
    with valkey() as server:
        config = config_of(kvstore={"redis_url": url_of(server), "redis_retry_s": 0.05})
        async with ControlNode(config=config) as control:
            async with KvStoreNode(control=control.address):
                computed = await fill(control, 1, 2, config=config)
            async with (
                KvStoreNode(control=control.address),
                working(config, control.address) as worker,
            ):
                answer = await worker.generate(prompt_of(1))
                stats = worker.tier.stats

    assert answer.token_ids == computed[0]
    assert answer.load.loaded_blocks == 25
    assert stats.blocks_loaded_from_l2 == 25

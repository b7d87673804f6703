"""Workers with a real KV store: the simulated engine, whose answers follow from its KV."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import numpy as np
import pytest

from kvstore.node import KvStoreNode
from kvstore.tier2 import Record
from services.control.node import ControlNode
from services.core.errors import Unavailable
from services.core.kvblocks import Bytes
from services.runtime.logs import FIELDS
from services.runtime.sharing import SharedMemory
from tests.runtime.processes import Running, running
from tests.worker.tiers import (
    BLOCK_TOKENS,
    CONFIG,
    NUM_BLOCKS,
    NUM_TOKENS,
    config_of,
    core_pid,
    fill,
    prompt_of,
    until,
    working,
)
from worker import store_client
from worker.loading import Decision


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
    assert (loaded.load.missing_blocks, loaded.load.loaded_blocks) == (NUM_BLOCKS, NUM_BLOCKS)
    assert loaded.load.load_ms > 0
    assert stats.blocks_loaded == NUM_BLOCKS
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
    assert loaded.load.loaded_blocks == NUM_BLOCKS


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


async def test_two_tenants_with_the_same_text_share_nothing(
    control: ControlNode, store: KvStoreNode
) -> None:
    first, second = prompt_of(1, tenant="first"), prompt_of(1, tenant="second")
    async with working(CONFIG, control.address) as worker:
        await worker.generate(first, tenant="first")
    async with working(CONFIG, control.address) as worker:
        other = await worker.generate(second, tenant="second")
        same = await worker.generate(first, tenant="first")
        await worker.settled()

    assert other.first.cached_tokens == 0
    assert other.load.reason == "no block of it is in the KV store"
    assert same.load.loaded_blocks == NUM_BLOCKS
    assert store.store.tier1.index.tenants() == {"first": 26, "second": 26}


async def test_a_decision_is_logged_with_both_estimates_and_its_outcome(
    control: ControlNode, store: KvStoreNode, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(control, 1)
    async with working(CONFIG, control.address) as worker:
        await worker.generate(prompt_of(2))
        await worker.generate(prompt_of(3))
        with caplog.at_level(logging.DEBUG, "worker.tier"):
            answer = await worker.generate(prompt_of(1))
        stats = worker.tier.stats
    [record] = [r for r in caplog.records if r.getMessage() == "kv load settled"]
    fields = record.__dict__[FIELDS]

    assert fields["decision"] == "load"
    assert fields["reason"] == answer.load.reason
    assert (fields["missing_blocks"], fields["loaded_blocks"]) == (NUM_BLOCKS, NUM_BLOCKS)
    assert fields["expected_compute_ms"] > 0
    assert fields["actual_ms"] > 0
    assert fields["regret_ms"] >= 0
    assert stats.num_load == 1
    assert stats.spent_ms == pytest.approx(fields["actual_ms"], abs=0.001)
    assert stats.regret_ms == pytest.approx(fields["regret_ms"], abs=0.001)


async def test_a_store_that_is_full_keeps_what_it_can_and_fails_nothing() -> None:
    """It has room for nine of twelve prompts, and the last are asked for again first."""
    config = config_of(kvstore={"capacity_mb": 1}, kv_load="always")
    names = range(12)
    async with ControlNode(config=config) as control, KvStoreNode(control=control.address) as store:
        computed = await fill(control, *names, config=config)
        async with working(config, control.address) as worker:
            answers = [await worker.generate(prompt_of(name)) for name in reversed(names)]
            stats = worker.tier.stats
        tier1 = store.store.tier1
        store.store.check_integrity()

    assert [answer.token_ids for answer in reversed(answers)] == computed
    assert tier1.index.num_blocks <= tier1.index.num_slots < 12 * NUM_BLOCKS
    assert tier1.counters.num_evicted > 0
    assert stats.blocks_loaded > 0


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
    # The store, which looks at what it gives, may have found it first.
    [(reason, count)] = stats.rejected.items()
    assert (reason in {"checksum", "generation", "missing"}, count) == (True, 1)
    assert answer.load.reason.endswith(f"ended after 10 blocks: {reason}")
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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_store_that_ends_while_blocks_are_read_fails_nothing(
    control: ControlNode, store_process: Running, how: signal.Signals
) -> None:
    names = range(3)
    computed = await fill(control, *names)
    async with working(config_of(num_inbox_blocks=4), control.address) as worker:
        answers = [asyncio.create_task(worker.generate(prompt_of(name))) for name in names]
        await until(lambda: worker.tier.stats.blocks_loaded > 0)
        store_process.send(how)
        done = [await answer for answer in answers]
        if how is signal.SIGSTOP:
            store_process.send(signal.SIGCONT)

    assert [answer.token_ids for answer in done] == computed


async def test_a_store_that_hangs_holds_no_request_longer_than_computing_takes() -> None:
    # Computing takes so long that blocks are worth loading on any machine.
    config = config_of(simulated={"prefill_tokens_per_s": 1000}, kv_load_timeout_ms=30_000.0)
    async with (
        ControlNode(config=config) as control,
        running("kvstore", "--control", control.address) as process,
    ):
        computed = await fill(control, 1, 2, config=config)
        async with working(config, control.address) as worker:
            await worker.generate(prompt_of(3))
            process.send(signal.SIGSTOP)
            held = await worker.generate(prompt_of(1))
            not_held = await worker.generate(prompt_of(2))
            stats = worker.tier.stats
            process.send(signal.SIGCONT)
            await until(lambda: worker.tier.may_load(NUM_TOKENS, prompt_of(9).prefix_keys))
            # Not in the pool, and in the store.
            prompt_ids = await fill(control, 4, config=config)
            after = await worker.generate(prompt_of(4))

    assert [held.token_ids, not_held.token_ids] == computed
    assert "timeout" in held.load.reason
    assert not_held.load.reason == "the KV store does not answer"
    assert stats.failed == {"timeout": 1}
    assert [after.token_ids] == prompt_ids
    assert after.load.loaded_blocks == NUM_BLOCKS


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

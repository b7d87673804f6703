"""What workers write to a real KV store."""

from __future__ import annotations

import signal

from kvstore.node import KvStoreNode
from services.control.node import ControlNode
from tests.runtime.processes import Running
from tests.worker.tiers import BLOCK_TOKENS, CONFIG, NUM_BLOCKS, config_of, prompt_of, working


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

    # They come step by step: some are written before the next are there.
    assert stats.blocks_stored >= 5
    assert stats.dropped.keys() == {"queue full"}
    assert stats.blocks_stored + stats.dropped["queue full"] == NUM_BLOCKS


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

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.sampling import Sampling
from worker.engines.contract import EngineInfo
from worker.messages import Submit
from worker.order import BATCH_AGEING_S
from worker.pool import BlockPool
from worker.prefix_cache import PrefixCache, TokenNames
from worker.scheduler import Planned, Scheduler, StepBudget
from worker.sequence import Sequence

INFO = EngineInfo(
    name="test",
    model="model",
    fingerprint=b"fingerprint",
    vocabulary_size=100,
    eos_token_ids=(2,),
    num_slots=2,
    max_context_tokens=64,
    block_tokens=8,
    block_bytes=1,
    num_blocks=16,
    kv_in_pool=True,
)


def new_budget(max_batch_tokens: int = 512) -> StepBudget:
    return StepBudget(max_step_s=0.25, max_batch_tokens=max_batch_tokens)


def new_scheduler(info: EngineInfo = INFO, budget: StepBudget | None = None) -> Scheduler:
    pool = BlockPool(np.zeros((info.num_blocks, info.block_bytes), dtype=np.uint8))
    return Scheduler(info, PrefixCache(info, pool, TokenNames(info)), budget or new_budget())


def request(
    request_id: int, num_prompt: int = 4, *, batch: bool = False, at_s: float = 0.0, most: int = 4
) -> Submit:
    prompt = np.arange(num_prompt, dtype=np.uint32)
    return Submit(request_id, prompt, (), Sampling(max_tokens=most), batch, at_s)


def start_without_cache(sequence: Sequence) -> None:
    sequence.started_s = 1.0


def ids(planned: list[Planned]) -> list[int]:
    return [item.sequence.request_id for item in planned]


def run_step(
    scheduler: Scheduler,
    start: Callable[[Sequence], None] = start_without_cache,
) -> list[Planned]:
    """What the core does in a step, with an engine that always answers 1."""
    scheduler.admit()
    planned = scheduler.plan(start)
    for sequence, work in planned:
        sequence.num_computed += len(work.tokens)
        if work.wants_logits:
            sequence.answer.append(1)
    return planned


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_wants_logits() -> None:
    scheduler = new_scheduler()
    scheduler.add(request(1, num_prompt=40))

    steps = [run_step(scheduler)[0].work for _ in range(3)]

    assert [len(work.tokens) for work in steps] == [32, 8, 1]
    assert [work.position for work in steps] == [0, 32, 40]
    assert [work.wants_logits for work in steps] == [False, True, True]


def test_decoding_goes_on_while_another_prompt_is_computed() -> None:
    scheduler = new_scheduler()
    scheduler.add(request(1))
    run_step(scheduler)
    scheduler.add(request(2, num_prompt=40))

    planned = run_step(scheduler)

    assert ids(planned) == [1, 2]
    assert len(planned[0].work.tokens) == 1
    assert 1 + len(planned[1].work.tokens) <= 1 + StepBudget.FIRST_TOKENS


def test_the_first_prompt_takes_the_whole_budget() -> None:
    scheduler = new_scheduler()
    scheduler.add(request(1, num_prompt=40))
    scheduler.add(request(2, num_prompt=4))

    assert ids(run_step(scheduler)) == [1]
    assert ids(run_step(scheduler)) == [1, 2]


def test_a_cached_prefix_is_brought_in_when_the_prompt_has_its_turn() -> None:
    scheduler = new_scheduler()
    started = []

    def start(sequence: Sequence) -> None:
        started.append(sequence.request_id)
        sequence.started_s = 1.0
        sequence.num_computed = 32

    scheduler.add(request(1, num_prompt=40))
    planned = run_step(scheduler, start)

    assert started == [1]
    assert planned[0].work.position == 32
    assert planned[0].work.wants_logits


def test_interactive_goes_before_batch_until_batch_has_aged() -> None:
    scheduler = new_scheduler(INFO._replace(num_slots=1))
    scheduler.add(request(1, batch=True, at_s=0.0))
    scheduler.add(request(2, at_s=BATCH_AGEING_S - 1))

    scheduler.admit()
    assert ids(scheduler.plan(start_without_cache)) == [2]

    scheduler.add(request(3, at_s=BATCH_AGEING_S + 1))
    scheduler.remove(2)
    scheduler.admit()
    assert ids(scheduler.plan(start_without_cache)) == [1]


def test_a_request_waits_for_kv_room_and_gets_it_when_another_ends() -> None:
    scheduler = new_scheduler(INFO._replace(num_blocks=4))
    scheduler.add(request(1, num_prompt=20, most=4))
    scheduler.add(request(2, num_prompt=20, most=4))

    scheduler.admit()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)

    scheduler.remove(1)
    scheduler.admit()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)


def test_removing_an_unknown_request_is_harmless() -> None:
    assert new_scheduler().remove(7) is None


@pytest.mark.parametrize(
    ("token_id", "sampling", "expected"),
    [
        (5, Sampling(max_tokens=9), ""),
        (2, Sampling(max_tokens=9), "stop"),
        (2, Sampling(max_tokens=9, ignore_eos=True), ""),
        (5, Sampling(max_tokens=9, stop_token_ids=(5,)), "stop"),
        (5, Sampling(max_tokens=1), "length"),
        (2, Sampling(max_tokens=1), "stop"),
    ],
)
def test_generation_ends_at_a_stop_or_the_length(
    token_id: int, sampling: Sampling, expected: str
) -> None:
    sequence = Sequence.of(request(1)._replace(sampling=sampling))

    assert sequence.finish_after(token_id, INFO) == expected


def test_generation_ends_where_the_context_does() -> None:
    sequence = Sequence.of(request(1, num_prompt=INFO.max_context_tokens - 1, most=9))

    assert sequence.finish_after(5, INFO) == "length"


def test_the_budget_follows_the_measured_rate() -> None:
    budget = new_budget()
    for _ in range(8):
        budget.observe(num_prompt=100, num_decoding=0, step_s=0.1)

    assert budget.prefill_tokens_per_s == pytest.approx(1000)
    assert budget.prompt_tokens(0) == pytest.approx(200, abs=1)


def test_a_small_cold_step_is_outweighed_by_the_rest_of_its_prompt() -> None:
    budget = new_budget()
    budget.observe(num_prompt=StepBudget.FIRST_TOKENS, num_decoding=0, step_s=0.32)
    budget.observe(num_prompt=512, num_decoding=0, step_s=0.512)

    assert 800 < budget.prefill_tokens_per_s < 1000


def test_the_budget_leaves_time_for_the_decoding_sequences() -> None:
    budget = new_budget()
    for _ in range(8):
        budget.observe(num_prompt=0, num_decoding=4, step_s=0.1)
        budget.observe(num_prompt=100, num_decoding=4, step_s=0.2)

    assert budget.prompt_tokens(4) == pytest.approx(100, abs=1)
    assert budget.prompt_tokens(0) == pytest.approx(200, abs=1)


def test_prompts_are_computed_beside_decoding_that_fills_the_step() -> None:
    budget = new_budget()
    for _ in range(8):
        budget.observe(num_prompt=100, num_decoding=0, step_s=0.1)
        budget.observe(num_prompt=0, num_decoding=4, step_s=0.24)

    assert budget.prompt_tokens(4) == pytest.approx(60, abs=1)


def test_a_prompt_always_advances_however_slow_the_engine() -> None:
    budget = new_budget()
    budget.observe(num_prompt=8, num_decoding=0, step_s=60)

    assert budget.prompt_tokens(3) == StepBudget.MIN_TOKENS


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 12), st.booleans()), max_size=12
    ),
    cancelled=st.sets(st.integers(0, 11)),
    num_blocks=st.integers(8, 20),
)
def test_every_request_ends_and_nothing_stays_taken(
    arrivals: list[tuple[int, int, bool]], cancelled: set[int], num_blocks: int
) -> None:
    budget = new_budget(max_batch_tokens=16)
    scheduler = new_scheduler(INFO._replace(num_blocks=num_blocks), budget)
    answered: dict[int, int] = {}
    for request_id, (num_prompt, most, batch) in enumerate(arrivals):
        scheduler.add(request(request_id, num_prompt, batch=batch, most=most))
    for step in range(2000):
        if scheduler.idle:
            break
        if step in cancelled:
            scheduler.remove(step)
        for sequence, _ in run_step(scheduler):
            if len(sequence.answer) == sequence.submit.sampling.max_tokens:
                answered[sequence.request_id] = len(sequence.answer)
                scheduler.remove(sequence.request_id)
        scheduler.check_integrity()

    assert scheduler.idle
    for request_id, (_, most, _batch) in enumerate(arrivals):
        assert request_id in cancelled or answered[request_id] == most


def test_nothing_more_is_computed_for_a_request_that_is_cancelled() -> None:
    scheduler = new_scheduler()
    scheduler.add(request(1))
    scheduler.add(request(2))
    scheduler.admit()
    left = scheduler.find(1)
    assert left is not None
    left.cancelled = True

    assert ids(scheduler.plan(start_without_cache)) == [2]

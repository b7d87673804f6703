"""KV that comes from elsewhere: from a prefill worker, or out of the store of a node."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.settings import MeshConfig
from services.core.workload import Arrival
from services.simulation.faults import Death, Fault, SlowWorker
from services.simulation.mesh import MeshPlan, replay
from services.simulation.router import Timing
from services.simulation.store import StorePlan
from tests.simulation.loads import chain, configure, errors, shared_prefixes

NO_HOPS = Timing(hop_s=0.0, report_s=0.0, membership_s=0.0)
TIMING = {
    "prefill_tokens_per_s": 20_000,
    "decode_step_ms": 10,
    "decode_step_ms_per_seq": 0,
    "num_blocks": 384,
    "kv_bytes_per_token": 10_000,
    "transfer_gb_per_s": 10,
}


def split(**timing: Any) -> MeshConfig:
    """A token's KV takes 1 us on its way, and 50 us to compute."""
    return configure(worker={"simulated": {**TIMING, **timing}, "max_batch_tokens": 512})


def test_a_prompt_is_computed_by_the_prefill_worker() -> None:
    plan = MeshPlan(config=split(), num_workers=1, num_prefill_workers=1, timing=NO_HOPS)
    result = replay([Arrival(0.0, (), 2000, 11)], plan)
    (outcome,) = result.outcomes
    assert outcome.worker == "worker-0"
    assert outcome.ttft_s == pytest.approx(0.1, rel=0.03)
    # The KV of the last chunk leaves when that is computed, and is copied in at the end.
    assert 0.2 < outcome.finished_s < 0.25
    assert result.workers["prefill-0"].uncached_tokens == 2000
    assert result.workers["worker-0"].uncached_tokens == 0
    assert result.workers["worker-0"].answer_tokens == 10


def test_a_short_prompt_is_computed_where_it_is_answered() -> None:
    plan = MeshPlan(config=split(), num_workers=1, num_prefill_workers=1)
    result = replay([Arrival(0.0, (), 50, 5)], plan)
    assert result.workers["worker-0"].uncached_tokens == 50


def test_prompts_do_not_hold_up_answers_elsewhere() -> None:
    arrivals = [Arrival(0.0, (), 2000, 200), Arrival(1.0, (), 8000, 5)]
    apart, together = (
        replay(
            arrivals, MeshPlan(config=split(), num_workers=1, num_prefill_workers=num_prefill)
        ).outcomes[0]
        for num_prefill in (1, 0)
    )
    # But for the copying of what comes.
    assert apart.finished_s < together.finished_s - 0.2


def test_an_answer_of_one_token_cancels_the_transfer() -> None:
    plan = MeshPlan(config=split(), num_workers=1, num_prefill_workers=1, timing=NO_HOPS)
    (outcome,) = replay([Arrival(0.0, (), 2000, 1)], plan).outcomes
    assert outcome.finished_s == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize("at_s", [0.03, 0.101])
def test_a_prefill_worker_that_dies_costs_the_computing_of_what_had_not_come(at_s: float) -> None:
    plan = MeshPlan(
        config=split(),
        num_workers=1,
        num_prefill_workers=1,
        timing=NO_HOPS,
        faults=(Death(at_s, worker=1),),
    )
    result = replay([Arrival(0.0, (), 2000, 20)], plan)
    assert errors(result.outcomes) == []
    assert result.workers["worker-0"].uncached_tokens == 2000
    assert result.workers["worker-0"].answer_tokens == 19


def test_an_equal_beginning_is_found_at_the_prefill_worker() -> None:
    plan = MeshPlan(config=split(), num_workers=2, num_prefill_workers=1)
    prefix = chain("p", 20)
    arrivals = [Arrival(float(index), prefix, 2000, 5) for index in range(3)]
    result = replay(arrivals, plan)
    uncached = sum(totals.uncached_tokens for totals in result.workers.values())
    assert uncached == 2000 + 2 * (2000 - 1280)


def test_the_store_of_a_node_gives_what_another_worker_there_computed() -> None:
    config = configure(strategy="round_robin", worker={"simulated": TIMING})
    prefix = chain("p", 60)
    arrivals = [Arrival(float(index), prefix, 4000, 5) for index in range(4)]
    without = replay(arrivals, MeshPlan(config=config, num_workers=4)).outcomes
    shared = replay(
        arrivals,
        MeshPlan(config=config, num_workers=4, store=StorePlan(workers_per_node=2)),
    ).outcomes
    assert [outcome.cached_tokens for outcome in without] == [0] * 4
    assert [outcome.cached_tokens for outcome in shared] == [0, 3840, 0, 3840]
    assert shared[1].ttft_s < without[1].ttft_s / 3


def test_a_slow_store_is_not_asked() -> None:
    config = configure(strategy="round_robin", worker={"simulated": TIMING})
    prefix = chain("p", 60)
    arrivals = [Arrival(float(index), prefix, 4000, 5) for index in range(2)]
    store = StorePlan(workers_per_node=2, gb_per_s=0.1)
    outcomes = replay(arrivals, MeshPlan(config=config, num_workers=2, store=store)).outcomes
    assert outcomes[1].cached_tokens == 0


def test_what_a_worker_computed_outlives_it_in_the_store() -> None:
    config = configure(worker={"simulated": TIMING})
    prefix = chain("p", 60)
    arrivals = [Arrival(0.0, prefix, 4000, 5), Arrival(5.0, prefix, 4000, 5)]
    plan = MeshPlan(
        config=config,
        num_workers=1,
        store=StorePlan(workers_per_node=1),
        faults=(Death(2.0, worker=0, returns_after_s=1.0),),
    )
    assert replay(arrivals, plan).outcomes[1].cached_tokens == 3840


@settings(max_examples=30, deadline=None)
@given(
    num_prefill=st.integers(0, 2),
    with_store=st.booleans(),
    overlap=st.booleans(),
    faults=st.lists(
        st.one_of(
            st.builds(Death, st.floats(0, 3), st.integers(0, 1), st.sampled_from([0.05, 1.0])),
            st.builds(
                SlowWorker, st.floats(0, 3), st.integers(0, 1), st.floats(1, 5), st.floats(0, 2)
            ),
        ),
        max_size=4,
    ),
    deaths_of_prefill=st.lists(st.floats(0, 3), max_size=3),
    deadline_s=st.sampled_from([None, 0.1]),
)
def test_whatever_goes_wrong_everything_ends_and_every_count_returns_to_zero(
    num_prefill: int,
    with_store: bool,
    overlap: bool,
    faults: list[Fault],
    deaths_of_prefill: list[float],
    deadline_s: float | None,
) -> None:
    if num_prefill:
        faults += [Death(at_s, 2, returns_after_s=0.2) for at_s in deaths_of_prefill]
    timing = {**TIMING, "decode_overlap": overlap}
    plan = MeshPlan(
        config=configure(
            worker={"simulated": timing, "max_batch_tokens": 256},
            max_attempts=16,
            max_migrations=16,
        ),
        num_workers=2,
        num_prefill_workers=num_prefill,
        num_routers=2,
        store=StorePlan(workers_per_node=2) if with_store else None,
        faults=tuple(faults),
    )
    arrivals = shared_prefixes(num_requests=60, rate=15, deadline_s=deadline_s)
    outcomes = replay(arrivals, plan).outcomes  # it checks the counts itself
    assert [outcome.arrival for outcome in outcomes] == arrivals
    if deadline_s is None:
        assert errors(outcomes) == []

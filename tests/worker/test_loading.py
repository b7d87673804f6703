from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.estimates import ReadCost, Tier
from worker.loading import Decision, EngineCost, Missing, decide, expect

SECONDS = st.floats(1e-5, 1.0)
COSTS = st.builds(ReadCost, latency_s=SECONDS, block_s=st.floats(0, 0.1))
MISSING = st.builds(
    Missing,
    num_blocks=st.integers(1, 300),
    tier=st.sampled_from(Tier),
    room=st.integers(1, 300),
)
ENGINES = st.builds(
    EngineCost,
    compute_block_s=SECONDS,
    step_s=SECONDS,
    import_block_s=st.floats(0, 0.01),
    wait_s=st.floats(0, 2.0),
    computing=st.booleans(),
)


def missing(num_blocks: int, *, tier: Tier = Tier.L2, room: int = 1000) -> Missing:
    return Missing(num_blocks, tier, room)


def simulate_both(what: Missing, read: ReadCost, engine: EngineCost) -> float:
    """Step after step, as the core does it."""
    now_s, head = engine.wait_s, 0.0
    while True:
        arrived = (now_s - read.latency_s) / read.block_s if now_s > read.latency_s else 0
        num_loaded = min(what.num_blocks, what.room, math.floor(arrived + 1e-9))
        lowest = what.num_blocks - num_loaded
        if head >= lowest:
            return now_s + num_loaded * engine.import_block_s
        step = min(engine.step_s / engine.compute_block_s, lowest - head)
        head += step
        now_s += step * engine.compute_block_s
        if head >= lowest - 1e-9:
            return now_s + num_loaded * engine.import_block_s


@given(MISSING, COSTS, ENGINES)
def test_no_way_is_chosen_whose_estimate_is_worse(
    what: Missing, read: ReadCost, engine: EngineCost
) -> None:
    plan = decide(what, read, engine)

    expected = plan.expected
    # Half a step is what doing both at once may take longer than expected.
    spare_s = engine.step_s / 2 if plan.decision is Decision.LOAD else 0.0
    assert expected.of(plan.decision) <= min(expected.compute_s, expected.load_s)
    assert expected.of(plan.decision) <= expected.both_s + spare_s
    assert expected.of(plan.decision) <= plan.best_other_s + plan.wait_s + spare_s + 1e-12


@given(
    MISSING,
    COSTS.filter(lambda cost: cost.block_s > 1e-5),
    ENGINES.filter(lambda engine: engine.step_s > engine.compute_block_s / 20),
)
def test_both_at_once_is_expected_to_take_what_the_steps_take(
    what: Missing, read: ReadCost, engine: EngineCost
) -> None:
    both_s = expect(what, read, engine).both_s

    assert both_s == pytest.approx(simulate_both(what, read, engine), rel=1e-3, abs=1e-6)


@given(MISSING, COSTS, ENGINES)
def test_both_at_once_is_never_expected_to_take_longer_than_computing_but_for_imports(
    what: Missing, read: ReadCost, engine: EngineCost
) -> None:
    expected = expect(what, read, engine)
    imports_s = expected.num_met * engine.import_block_s

    assert expected.both_s <= expected.compute_s + imports_s + 1e-9


ENGINE = EngineCost(compute_block_s=0.010, step_s=0.200)


def test_a_load_shorter_than_a_step_is_waited_for() -> None:
    plan = decide(missing(100), ReadCost(0.005, 0.0005), ENGINE)

    assert plan.decision is Decision.LOAD
    assert plan.num_blocks == 100
    assert plan.expected.load_s == pytest.approx(0.055)


def test_a_load_longer_than_a_step_runs_beside_the_computing() -> None:
    plan = decide(missing(100), ReadCost(0.005, 0.008), ENGINE)

    assert plan.decision is Decision.BOTH
    assert plan.expected.both_s < plan.expected.load_s < plan.expected.compute_s
    assert 40 <= plan.expected.num_met <= 60


def test_a_load_that_cannot_pay_is_left() -> None:
    plan = decide(missing(10), ReadCost(0.5, 0.020), ENGINE)

    assert plan.decision is Decision.COMPUTE
    assert plan.num_blocks == 0
    assert plan.reason == "10 blocks in L2 computed: 700 ms to load, 100 ms to compute"


def test_what_computes_in_one_step_is_not_split() -> None:
    plan = decide(missing(15), ReadCost(0.140, 0.002), ENGINE)

    assert plan.expected.both_s == plan.expected.compute_s
    assert plan.decision is Decision.COMPUTE


def test_waiting_for_the_engine_hides_the_load() -> None:
    read = ReadCost(0.1, 0.015)
    now = decide(missing(10), read, ENGINE)
    queued = decide(missing(10), read, ENGINE._replace(wait_s=0.5))

    assert now.decision is Decision.COMPUTE
    assert queued.decision is Decision.LOAD
    assert queued.expected.load_s == pytest.approx(0.5)


def test_an_engine_that_has_begun_is_not_made_to_wait() -> None:
    plan = decide(missing(100), ReadCost(0.005, 0.0005), ENGINE._replace(computing=True))

    assert plan.decision is Decision.BOTH


def test_no_more_is_loaded_from_the_tail_than_there_is_room_for() -> None:
    plan = decide(missing(100, room=8), ReadCost(0.005, 0.008), ENGINE._replace(computing=True))

    assert plan.decision is Decision.BOTH
    assert plan.num_blocks == 8
    assert plan.expected.num_met == 8


def test_an_engine_not_measured_yet_loads() -> None:
    plan = decide(missing(5), ReadCost(0.005, 0.008), EngineCost(0.0, 0.0))

    assert plan.decision is Decision.LOAD
    assert plan.reason == "5 blocks in L2 loaded: 45 ms to load, an unknown time to compute"


def test_an_engine_that_has_begun_and_is_not_measured_yet_is_met() -> None:
    plan = decide(missing(5), ReadCost(0.005, 0.008), EngineCost(0.0, 0.0, computing=True))

    assert plan.decision is Decision.BOTH

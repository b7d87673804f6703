from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.loading import (
    PROBE_BLOCKS,
    STALE_AFTER_S,
    Decision,
    EngineCost,
    Expected,
    LoadPlanner,
    Missing,
    Plan,
    ReadCost,
    ReadEstimate,
    Tally,
    Tier,
    decide,
    expect,
)

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


def time_of(plan: Plan) -> float:
    expected = plan.expected
    return {
        Decision.COMPUTE: expected.compute_s,
        Decision.LOAD: expected.load_s,
        Decision.BOTH: expected.both_s,
    }[plan.decision]


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

    assert time_of(plan) == min(plan.expected[:3])
    assert time_of(plan) <= plan.best_other_s + plan.wait_s + 1e-12


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
    assert plan.reason == "10 blocks in L2: 700 ms to load, 100 ms to compute"


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
    assert plan.reason == "5 blocks in L2: 45 ms to load, an unknown time to compute"


def test_an_engine_that_has_begun_and_is_not_measured_yet_is_met() -> None:
    plan = decide(missing(5), ReadCost(0.005, 0.008), EngineCost(0.0, 0.0, computing=True))

    assert plan.decision is Decision.BOTH


# --- estimates


@given(
    st.floats(0.0005, 0.1),
    st.floats(1e-4, 0.02),
    st.lists(st.integers(1, 128), min_size=40, max_size=40),
)
def test_an_estimate_converges_to_what_reads_take(
    latency_s: float, block_s: float, sizes: list[int]
) -> None:
    law = ReadCost(latency_s, block_s)
    estimate = ReadEstimate()
    for size in sizes:
        estimate.observe(size, law.of(size), 0.0)

    cost = estimate.cost

    assert cost is not None
    for size in sizes[-5:]:  # what is long ago is forgotten
        assert cost.of(size) == pytest.approx(law.of(size), rel=0.25, abs=0.001)


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_an_estimate_follows_a_tier_that_changes(factor: float) -> None:
    source = random.Random(1)
    before, after = ReadCost(0.004, 0.002), ReadCost(0.004, 0.002 * factor)
    estimate = ReadEstimate()
    for law in (before, after):
        for _ in range(40):
            size = source.randint(4, 100)
            estimate.observe(size, law.of(size) * source.uniform(0.8, 1.2), 0.0)

    cost = estimate.cost

    assert cost is not None
    assert cost.of(50) == pytest.approx(after.of(50), rel=0.3)


def test_one_slow_read_does_not_make_a_slow_tier() -> None:
    estimate = ReadEstimate()
    for _ in range(20):
        estimate.observe(10, 0.010, 0.0)
    estimate.observe(10, 5.0, 0.0)

    cost = estimate.cost

    assert cost is not None
    assert cost.of(10) < 0.025


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 100.0)), min_size=1, max_size=50))
def test_an_estimate_is_never_negative_whatever_was_observed(
    reads: list[tuple[int, float]],
) -> None:
    estimate = ReadEstimate()
    for size, read_s in reads:
        estimate.observe(size, read_s, 0.0)

        cost = estimate.cost

        assert cost is not None
        assert cost.latency_s >= 0
        assert cost.block_s >= 0
        assert math.isfinite(cost.of(500))


def test_what_others_measured_serves_until_something_was_read() -> None:
    estimate = ReadEstimate()
    estimate.hint(ReadCost(0.1, 0.1))
    hinted = estimate.cost
    estimate.observe(10, 0.010, 0.0)

    assert hinted == ReadCost(0.1, 0.1)
    assert estimate.cost is not None
    assert estimate.cost.of(10) < 0.5


# --- plans


@given(st.integers(1, 500), st.integers(1, 500), ENGINES)
def test_a_tier_of_which_nothing_is_known_is_probed_and_not_trusted_with_a_chain(
    num_blocks: int, room: int, engine: EngineCost
) -> None:
    planner = LoadPlanner()

    plan = planner.plan(missing(num_blocks, room=room), engine, 0.0)

    assert plan.probe
    assert 1 <= plan.num_blocks <= PROBE_BLOCKS
    assert planner.tally.num_probes == 1


def test_after_the_probe_the_rest_is_decided() -> None:
    planner = LoadPlanner()
    planner.plan(missing(100), ENGINE, 0.0)
    planner.read(Tier.L2).observe(4, 0.004, 0.0)

    plan = planner.plan(missing(96), ENGINE, 0.0)

    assert plan.decision is Decision.LOAD
    assert not plan.probe
    assert plan.num_blocks == 96


def test_a_tier_found_too_slow_is_looked_at_again_beside_the_computing() -> None:
    planner = LoadPlanner()
    planner.read(Tier.L2).observe(4, 10.0, 0.0)

    soon = planner.plan(missing(20), ENGINE, STALE_AFTER_S - 1)
    later = planner.plan(missing(20), ENGINE, STALE_AFTER_S + 1)

    assert (soon.decision, soon.num_blocks) == (Decision.COMPUTE, 0)
    assert (later.decision, later.num_blocks) == (Decision.COMPUTE, PROBE_BLOCKS)
    assert later.probe


def test_importing_counts_against_loading() -> None:
    planner = LoadPlanner()
    planner.read(Tier.L1).observe(10, 0.010, 0.0)
    planner.observe_import(10, 1.0)

    plan = planner.plan(missing(10, tier=Tier.L1), ENGINE, 0.0)

    assert plan.decision is Decision.COMPUTE
    assert planner.import_block_s == pytest.approx(0.1, rel=0.05)


def test_regret_is_what_the_best_other_way_would_have_saved() -> None:
    plan = Plan(Decision.LOAD, 3, Expected(compute_s=0.3, load_s=0.1, both_s=0.2), "")
    tally = Tally()
    tally.count(plan)

    assert tally.settle(plan.best_other_s, 0.15) == 0
    assert tally.settle(plan.best_other_s, 0.5) == pytest.approx(0.3)
    assert tally.regret_s == pytest.approx(0.3)
    assert tally.spent_s == pytest.approx(0.65)
    assert (tally.num_load, tally.num_both, tally.num_compute) == (1, 0, 0)


@given(st.integers(0, 2**32), st.floats(0.2, 5.0))
def test_the_regret_of_a_tier_near_the_crossover_stays_small(seed: int, ratio: float) -> None:
    """Against an oracle that knows the costs, for reads of any length."""
    source = random.Random(seed)
    law = ReadCost(0.020, ENGINE.compute_block_s * ratio)
    planner = LoadPlanner()
    spent_s = best_s = 0.0
    for now_s in range(60):
        rest = missing(source.randint(4, 100))
        took_s = 0.0
        while rest.num_blocks:
            plan = planner.plan(rest, ENGINE, float(now_s))
            true = expect(rest._replace(num_blocks=max(rest.num_blocks, 1)), law, ENGINE)
            if plan.probe and plan.decision is Decision.LOAD:
                took_s += law.of(plan.num_blocks)
                planner.read(Tier.L2).observe(plan.num_blocks, law.of(plan.num_blocks), now_s)
                rest = rest._replace(num_blocks=rest.num_blocks - plan.num_blocks)
                continue
            took_s += time_of(plan._replace(expected=true))
            if plan.num_blocks:
                planner.read(Tier.L2).observe(plan.num_blocks, law.of(plan.num_blocks), now_s)
            break
        spent_s += took_s
        best_s += min(expect(missing(rest.num_blocks or 1), law, ENGINE)[:3])

    assert spent_s <= 1.1 * best_s

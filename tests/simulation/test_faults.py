"""What goes wrong in a mesh costs time, and loses nothing that could be tried again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.workload import Arrival
from services.simulation.faults import (
    BadReports,
    Death,
    Fault,
    Flapping,
    Partition,
    SlowWorker,
)
from services.simulation.feeds import Trouble
from services.simulation.mesh import MeshPlan, Replayed, replay
from services.simulation.router import Outcome
from tests.simulation.loads import configure, errors, hit_rate, median_ttft_s, shared_prefixes

RATE = 40.0
LATE = Trouble(delay_s=2.0)
TROUBLES = {
    "late": LATE,
    "lost": Trouble(lost=0.3),
    "twice": Trouble(duplicated=0.5),
    "in disorder": Trouble(jitter_s=0.05),
    "all at once": Trouble(delay_s=0.2, jitter_s=0.1, lost=0.1, duplicated=0.2),
}


def under(*faults: Fault, num_requests: int = 600, num_routers: int = 2) -> Replayed:
    plan = MeshPlan(config=configure(), num_workers=4, num_routers=num_routers, faults=faults)
    return replay(shared_prefixes(num_requests=num_requests, rate=RATE), plan)


def between(outcomes: list[Outcome], first_s: float, last_s: float) -> list[Outcome]:
    return [each for each in outcomes if first_s <= each.arrival.at_s < last_s]


def test_a_death_under_load_loses_nothing() -> None:
    result = under(Death(5.0, worker=1))
    assert errors(result.outcomes) == []
    moved = [each for each in result.outcomes if each.migrations or each.attempts > 1]
    assert moved
    assert all(each.worker != "worker-1" for each in moved)


def test_an_answer_that_had_begun_goes_on_elsewhere_and_is_whole() -> None:
    plan = MeshPlan(config=configure(), num_workers=2, faults=(Death(1.0, worker=0),))
    arrivals = [Arrival(0.0, (), 1000, 300), Arrival(0.1, (), 1000, 300)]
    result = replay(arrivals, plan)
    assert errors(result.outcomes) == []
    assert sorted(each.migrations for each in result.outcomes) == [0, 1]
    # None is given twice; the first that a worker gives of an answer comes out of its prompt.
    assert sum(each.answer_tokens for each in result.workers.values()) == 600 - 3


def test_an_answer_does_not_move_for_ever() -> None:
    config = configure(max_migrations=1)
    faults = tuple(Death(1.0 + index, worker=index) for index in range(2))
    plan = MeshPlan(config=config, num_workers=3, faults=faults)
    (outcome,) = replay([Arrival(0.0, (), 1000, 1000)], plan).outcomes
    faults = tuple(Death(0.5 + index, worker=index) for index in range(3))
    plan = MeshPlan(config=config, num_workers=4, faults=faults)
    outcomes = replay([Arrival(0.0, (), 1000, 1000) for _ in range(4)], plan).outcomes
    assert outcome.error in ("", "WORKER_DIED")
    assert "WORKER_DIED" in errors(outcomes)


def test_a_second_after_a_death_requests_are_as_fast_as_the_rest_allow() -> None:
    with_death = under(Death(8.0, worker=1)).outcomes
    plan = MeshPlan(config=configure(), num_workers=3, num_routers=2)
    three = replay(shared_prefixes(num_requests=600, rate=RATE), plan).outcomes
    after = median_ttft_s(between(with_death, 9.0, 12.0))
    assert after <= 1.5 * median_ttft_s(between(three, 9.0, 12.0))


def test_a_worker_that_comes_back_takes_its_share_of_a_load_that_needs_it() -> None:
    plan = MeshPlan(
        config=configure(),
        num_workers=4,
        num_routers=2,
        faults=(Death(4.0, worker=1, returns_after_s=1.0),),
    )
    outcomes = replay(shared_prefixes(num_requests=1800, rate=3 * RATE), plan).outcomes
    assert errors(outcomes) == []
    later = between(outcomes, 7.0, 15.0)
    share = sum(each.worker == "worker-1" for each in later) / len(later)
    assert 0.1 < share < 0.4


def test_a_worker_that_dies_with_requests_in_its_queue_tells_nothing_more() -> None:
    plan = MeshPlan(
        config=configure(worker={"num_slots": 64, "simulated": {"num_blocks": 64}}),
        num_workers=2,
        faults=(Death(1.05, worker=0),),
    )
    arrivals = [Arrival(1.0 + index / 1000, (), 2000, 200) for index in range(20)]
    assert errors(replay(arrivals, plan).outcomes) == []


def test_ten_flaps_a_second_lose_nothing() -> None:
    result = under(Flapping(3.0, worker=2, lasts_s=5.0))
    assert errors(result.outcomes) == []
    calm = between(result.outcomes, 10.0, 15.0)
    assert median_ttft_s(calm) < 0.05


def test_a_slow_worker_gets_less() -> None:
    result = under(SlowWorker(0.0, worker=0, factor=4.0, lasts_s=60.0), num_requests=1000)
    assert errors(result.outcomes) == []
    tokens = {name: totals.uncached_tokens for name, totals in result.workers.items()}
    others = [count for name, count in tokens.items() if name != "worker-0"]
    assert tokens["worker-0"] < 0.7 * sum(others) / len(others)


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_bad_reports_cost_little(trouble: Trouble) -> None:
    good = under().outcomes
    bad = under(BadReports(0.0, trouble, lasts_s=60.0)).outcomes
    assert errors(bad) == []
    assert hit_rate(bad) > 0.9 * hit_rate(good)


def test_a_router_that_is_parted_goes_on_with_what_it_knows() -> None:
    good = under().outcomes
    result = under(Partition(3.0, router=0, lasts_s=6.0), Death(5.0, worker=3))
    assert errors(result.outcomes) == []
    assert hit_rate(result.outcomes) > 0.8 * hit_rate(good)


def test_faults_are_the_same_each_time() -> None:
    faults = (
        BadReports(0.0, TROUBLES["all at once"], lasts_s=4.0),
        Flapping(2.0, worker=0, lasts_s=1.0),
    )
    assert repr(under(*faults, num_requests=200)) == repr(under(*faults, num_requests=200))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(Death, st.floats(0, 4), st.integers(0, 2), st.sampled_from([0.05, 1.0])),
            st.builds(
                Flapping, st.floats(0, 4), st.integers(0, 2), st.floats(0.1, 1), st.just(10.0)
            ),
            st.builds(
                SlowWorker, st.floats(0, 4), st.integers(0, 2), st.floats(0.5, 5), st.floats(0, 2)
            ),
            st.builds(
                BadReports,
                st.floats(0, 4),
                st.sampled_from(list(TROUBLES.values())),
                st.floats(0, 3),
                st.none(),
                st.sampled_from([None, (1,)]),
            ),
            st.builds(Partition, st.floats(0, 4), st.integers(0, 1), st.floats(0, 3)),
        ),
        max_size=6,
    )
)
def test_whatever_goes_wrong_everything_ends_and_every_count_returns_to_zero(
    faults: list[Fault],
) -> None:
    plan = MeshPlan(
        config=configure(max_attempts=16, max_migrations=16),
        num_workers=3,
        num_routers=2,
        faults=tuple(faults),
    )
    arrivals = shared_prefixes(num_requests=80, rate=20)
    outcomes = replay(arrivals, plan).outcomes  # it checks the counts itself
    assert [outcome.arrival for outcome in outcomes] == arrivals
    assert errors(outcomes) == []

"""A mesh under virtual time: the same each time, and nothing is lost in it."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.workload import Arrival
from services.simulation.mesh import MeshPlan, Replayed, replay
from services.simulation.router import Timing
from tests.simulation.loads import (
    chain,
    configure,
    errors,
    hit_rate,
    median_ttft_s,
    shared_prefixes,
)

NO_HOPS = Timing(hop_s=0.0, report_s=0.0, membership_s=0.0)
PRINT_DIGEST = """
import hashlib
from services.simulation.mesh import MeshPlan, replay
from tests.simulation.loads import configure, shared_prefixes
result = replay(
    shared_prefixes(num_requests=200, rate=40),
    MeshPlan(config=configure(), num_workers=4, num_routers=2),
)
print(hashlib.sha256(repr(result).encode()).hexdigest())
"""


def small(strategy: str = "kv_aware", *, num_routers: int = 1, seed: int = 0) -> Replayed:
    plan = MeshPlan(
        config=configure(strategy=strategy), num_workers=4, num_routers=num_routers, seed=seed
    )
    return replay(shared_prefixes(num_requests=300, rate=40, seed=seed), plan)


def test_one_request_takes_what_the_timing_model_says() -> None:
    plan = MeshPlan(config=configure(), num_workers=1, timing=NO_HOPS)
    outcome = replay([Arrival(0.0, (), 2000, 11)], plan).outcomes[0]
    assert outcome.ttft_s == pytest.approx(0.1)
    assert outcome.tpot_s == pytest.approx(0.01)
    assert outcome.finished_s == pytest.approx(0.2)


def test_messages_take_their_time() -> None:
    timing = Timing(hop_s=0.5, report_s=0.0, membership_s=0.0)
    plan = MeshPlan(config=configure(), num_workers=1, timing=timing)
    outcome = replay([Arrival(0.0, (), 2000, 11)], plan).outcomes[0]
    assert outcome.ttft_s == pytest.approx(1.1)
    assert outcome.finished_s == pytest.approx(1.2)


def test_a_request_that_comes_during_a_leap_waits_for_the_step_in_progress_alone() -> None:
    plan = MeshPlan(config=configure(), num_workers=1, timing=NO_HOPS)
    long = Arrival(0.0, (), 2000, 1000)  # answers from 0.1 s on, a token each 10 ms
    other = Arrival(0.5049, (), 200, 2)  # prompt of 10 ms, mixed with a decode step
    outcomes = replay([long, other], plan).outcomes
    assert outcomes[1].ttft_s == pytest.approx(0.51 - 0.5049 + 0.02)
    assert outcomes[0].finished_s == pytest.approx(0.1 + 999 * 0.01 + 0.01)


def test_decodes_beside_prompts_neither_hold_them_up_nor_are_held_up() -> None:
    timing = {
        **{"num_blocks": 384, "prefill_tokens_per_s": 20_000, "transfer_gb_per_s": 1e6},
        **{"decode_step_ms": 10, "decode_step_ms_per_seq": 0, "decode_overlap": True},
    }
    config = configure(worker={"simulated": timing})
    plan = MeshPlan(config=config, num_workers=1, timing=NO_HOPS)
    long = Arrival(0.0, (), 2000, 1000)  # answers from 0.1 s on, a token each 10 ms
    other = Arrival(0.5049, (), 200, 3)  # a prompt of 10 ms
    outcomes = replay([long, other], plan).outcomes
    assert outcomes[0].finished_s == pytest.approx(0.1 + 999 * 0.01)
    assert outcomes[1].ttft_s == pytest.approx(0.01)
    # It answers from the next decode step on, which begins at 0.52 s.
    assert outcomes[1].finished_s == pytest.approx(0.54)


def test_an_equal_beginning_is_found() -> None:
    plan = MeshPlan(config=configure(), num_workers=1)
    prefix = chain("p", 16)
    outcomes = replay([Arrival(0.0, prefix, 1100, 4), Arrival(5.0, prefix, 1100, 4)], plan).outcomes
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 1024]
    assert outcomes[1].predicted_tokens == 1024
    assert outcomes[1].ttft_s < outcomes[0].ttft_s / 5


def test_blocks_that_nobody_shares_fill_the_cache() -> None:
    worker = {"simulated": {"num_blocks": 40, "prefill_tokens_per_s": 20_000}}
    plan = MeshPlan(config=configure(worker=worker), num_workers=1)
    prefix = chain("p", 16)
    arrivals = [
        Arrival(0.0, prefix, 1024, 4),
        Arrival(5.0, (), 1500, 4),
        Arrival(10.0, (), 1500, 4),
        Arrival(15.0, prefix, 1024, 4),
    ]
    assert [outcome.cached_tokens for outcome in replay(arrivals, plan).outcomes] == [0] * 4


@pytest.mark.parametrize("strategy", ["kv_aware", "prefix_aware", "least_outstanding"])
def test_the_same_seed_gives_the_same_result(strategy: str) -> None:
    assert repr(small(strategy)) == repr(small(strategy))
    assert repr(small(strategy)) != repr(small(strategy, seed=1))


def test_another_process_gives_the_same_result() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PRINT_DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_every_request_ends_once_and_every_token_is_counted() -> None:
    result = small()
    assert len(result.outcomes) == 300
    assert errors(result.outcomes) == []
    totals = result.workers.values()
    assert sum(each.num_requests for each in totals) == 300
    assert sum(each.prompt_tokens for each in totals) == 300 * 1152
    cached = sum(outcome.cached_tokens for outcome in result.outcomes)
    assert sum(each.uncached_tokens for each in totals) == 300 * 1152 - cached
    assert sum(each.answer_tokens for each in totals) == 300 * 31  # but the first


def test_kv_aware_finds_more_than_round_robin() -> None:
    aware, in_turn = small().outcomes, small("round_robin").outcomes
    assert hit_rate(aware) > hit_rate(in_turn) + 0.1
    assert median_ttft_s(aware) < median_ttft_s(in_turn)


def test_four_routers_find_nearly_as_much_as_one() -> None:
    arrivals = shared_prefixes(num_requests=1500, rate=60, num_prefixes=48)
    one, four = (
        hit_rate(
            replay(
                arrivals, MeshPlan(config=configure(), num_workers=8, num_routers=num_routers)
            ).outcomes
        )
        for num_routers in (1, 4)
    )
    assert four >= 0.95 * one


def test_a_prompt_that_fits_into_no_worker_is_refused_at_once() -> None:
    plan = MeshPlan(config=configure(worker={"max_context_tokens": 256}), num_workers=1)
    long, short = replay([Arrival(0.0, (), 256, 4), Arrival(0.0, (), 255, 4)], plan).outcomes
    assert (long.error, long.finished_s) == ("PROMPT_TOO_LONG", 0.0)
    assert not short.error


def test_a_deadline_ends_a_request_and_frees_its_place() -> None:
    plan = MeshPlan(config=configure(), num_workers=1)
    arrivals = [Arrival(0.0, (), 2000, 8000), Arrival(0.0, (), 2000, 4000, deadline_s=1.0)]
    outcomes = replay(arrivals, plan).outcomes
    assert [outcome.error for outcome in outcomes] == ["", "DEADLINE_EXCEEDED"]
    assert outcomes[1].finished_s == pytest.approx(1.0)


def test_a_step_that_outlasts_all_requests_ends_before_anything_is_counted() -> None:
    slow = {"prefill_tokens_per_s": 0.01, "decode_step_ms": 10, "num_blocks": 384}
    plan = MeshPlan(config=configure(worker={"simulated": slow}), num_workers=1)
    (outcome,) = replay([Arrival(0.0, (), 2000, 10, deadline_s=1.0)], plan).outcomes
    assert outcome.error == "DEADLINE_EXCEEDED"


def test_a_full_queue_refuses() -> None:
    config = configure(worker={"num_slots": 1, "max_batch_tokens": 512}, max_queue=2)
    outcomes = replay(
        [Arrival(0.0, (), 2000, 10)] * 5, MeshPlan(config=config, num_workers=1)
    ).outcomes
    assert errors(outcomes) == ["QUEUE_FULL"] * 2
    assert all(math.isnan(outcome.ttft_s) for outcome in outcomes if outcome.error)


def test_without_a_worker_requests_are_given_up() -> None:
    plan = MeshPlan(config=configure(worker_wait_s=3), num_workers=0)
    (outcome,) = replay([Arrival(1.0, (), 100, 10)], plan).outcomes
    assert outcome.error == "NO_WORKER"
    assert outcome.finished_s == pytest.approx(4.0)


def test_times_that_go_back_are_refused() -> None:
    plan = MeshPlan(config=configure(), num_workers=1)
    with pytest.raises(ValueError, match="request 1 comes at 1 s, before"):
        replay([Arrival(2.0, (), 100, 10), Arrival(1.0, (), 100, 10)], plan)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.builds(
            lambda wait_s, name, blocks, own, output, batch, deadline_s: (
                wait_s,
                Arrival(
                    0.0,
                    chain(name, blocks),
                    blocks * 64 + own,
                    output,
                    request_class="batch" if batch else "interactive",
                    deadline_s=deadline_s,
                ),
            ),
            st.sampled_from([0.0, 0.001, 0.05, 1.0]),
            st.sampled_from("abc"),
            st.integers(0, 20),
            st.integers(1, 300),
            st.integers(1, 60),
            st.booleans(),
            st.sampled_from([None, None, 0.02, 0.5]),
        ),
        max_size=30,
    ),
    num_workers=st.integers(1, 3),
    num_routers=st.integers(1, 2),
    num_blocks=st.integers(32, 80),
)
def test_whatever_is_asked_everything_ends_and_every_count_returns_to_zero(
    arrivals: list[tuple[float, Arrival]], num_workers: int, num_routers: int, num_blocks: int
) -> None:
    timing = {"num_blocks": num_blocks, "prefill_tokens_per_s": 20_000}
    config = configure(worker={"num_slots": 3, "simulated": timing, "max_batch_tokens": 256})
    plan = MeshPlan(config=config, num_workers=num_workers, num_routers=num_routers)
    at_s = 0.0
    workload = []
    for wait_s, arrival in arrivals:
        at_s += wait_s
        workload.append(arrival._replace(at_s=at_s))
    outcomes = replay(workload, plan).outcomes  # it checks the counts itself
    assert [outcome.arrival for outcome in outcomes] == workload
    assert set(errors(outcomes)) <= {"DEADLINE_EXCEEDED", "EXPECTED_WAIT"}

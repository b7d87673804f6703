"""What a change of the configuration did, and what is only noise."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.observer.effects import MAX_GENERATIONS, MAX_SAMPLE, Effects
from services.observer.model import Generation, Window
from tests.observer.made import a_request


def effects(*means_s: float, num_requests: int = 80, **changes: Any) -> Effects:
    """A generation for each mean TTFT."""
    chance, found = random.Random(4), Effects()
    for number, mean_s in enumerate(means_s, 1):
        pair = ("old", "new")
        found.add_generation(
            Generation(
                number, 100.0 * number, {"router.routing_strategy": pair} if number > 1 else {}
            )
        )
        for _ in range(num_requests):
            ttft_s = chance.expovariate(1 / mean_s)
            found.add(a_request(generation=number, ttft_s=ttft_s, **changes))
    found.check_integrity()
    return found


def last(found: Effects) -> dict[str, Any]:
    rows = found.report()["generations"]
    json.dumps(rows)
    row: dict[str, Any] = rows[-1]
    return row


def test_a_change_that_does_something_is_more_than_noise() -> None:
    row = last(effects(0.1, 0.05))
    assert row["changes"] == {"router.routing_strategy": ["old", "new"]}
    assert row["effect"]["against"] == 1
    assert row["effect"]["verdict"] == "TTFT lower"
    assert row["effect"]["ttft"]["more_than_noise"]
    assert row["effect"]["ttft"]["change"] < -0.3
    assert not row["effect"]["tpot"]["more_than_noise"]


def test_a_change_that_does_nothing_is_noise() -> None:
    assert last(effects(0.1, 0.1))["effect"]["verdict"] == "no more than noise"


def test_who_was_refused_counts_where_it_came() -> None:
    found = effects(0.1, 0.05)
    for arrived_unix_s in (99.0, 150.0, 250.0, 260.0):
        refused = a_request(generation=0, ttft_s=None, error="full", arrived_unix_s=arrived_unix_s)
        found.add(refused)
    rows = found.report()["generations"]

    assert [(row["generation"], row["failed"]) for row in rows] == [(1, 1), (2, 2)]


def test_of_few_requests_nothing_is_said() -> None:
    row = last(effects(0.1, 0.05, num_requests=10))
    assert row["effect"] is None  # nothing before it that could be compared with
    found = effects(0.1)
    found.add(a_request(generation=2))
    assert last(found)["effect"]["verdict"] == "not enough evidence"


def test_other_prompts_are_said_to_be_a_reason() -> None:
    found = effects(0.1)
    chance = random.Random(5)
    for _ in range(80):
        found.add(a_request(generation=2, ttft_s=chance.expovariate(5), prompt_tokens=900))
    assert "prompts differ" in last(found)["effect"]["note"]


def test_failed_requests_are_counted_alone() -> None:
    found = effects(0.1)
    found.add(a_request(generation=1, ttft_s=None, error="WORKER_DIED"))
    row = last(found)
    assert (row["requests"], row["failed"]) == (81, 1)


def test_a_window_gives_its_own() -> None:
    requests = tuple(a_request(generation=7, ttft_s=0.1) for _ in range(30))
    window = Window(
        begin_unix_s=0.0,
        end_unix_s=9.0,
        requests=requests,
        readings=(),
        bubbles=(),
        members=(),
        generations=(Generation(7, 1.0, {}),),
    )
    row = last(Effects.of(window))
    assert (row["generation"], row["requests"], row["ttft_mean_ms"]) == (7, 30, 100.0)


def test_what_is_kept_is_bounded() -> None:
    found = effects(0.1, num_requests=MAX_SAMPLE + 300)
    for number in range(2, MAX_GENERATIONS + 20):
        found.add(a_request(generation=number))
        found.check_integrity()
    found.add(a_request(generation=1))
    found.check_integrity()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 90), st.floats(0.001, 5) | st.none()), max_size=120))
def test_requests_may_come_in_any_order(told: list[tuple[int, float | None]]) -> None:
    found = Effects()
    for generation, ttft_s in told:
        found.add(a_request(generation=generation, ttft_s=ttft_s))
        found.check_integrity()
    json.dumps(found.report(), allow_nan=False)

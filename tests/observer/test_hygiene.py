"""What is predicted for traffic with stamps, against the same traffic without them."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.observer.hygiene import report
from tests.observer.chats import chat, prose, spelling
from tests.observer.traffic import START_S, Traffic

# Between the hit rate that is predicted and the one that comes.
WITHIN = 0.03


def hygiene(traffic: Traffic, **changes: Any) -> dict[str, Any]:
    found = report(traffic.window, traffic.prompts, **{"spelling": spelling(), **changes})
    json.dumps(found)
    return found


def stamp(number: int) -> str:
    at = datetime.fromtimestamp(START_S + 7.3 * number, UTC)
    return f"Current time: {at:%Y-%m-%d %H:%M:%S}. "


def nonce(number: int) -> str:
    return f"Request {random.Random(number).randbytes(6).hex()}. "


def session(number: int) -> str:
    return f"session={uuid.UUID(int=random.Random(number).getrandbits(128))}\n"


def counter(number: int) -> str:
    return f"Turn {100 + number}: "


def everybody(number: int) -> bool:
    return True


def every_second(number: int) -> bool:
    return number % 2 == 0


def run(
    value: Callable[[int], str],
    has_value: Callable[[int], bool],
    *,
    num_requests: int = 40,
    num_rules: int = 3,
    words_before: int = 5,
    words_behind: int = 160,
    block_tokens: int = 16,
) -> tuple[Traffic, float]:
    """Traffic with the value in it, and the hit rate that it has without."""
    chance = random.Random(3)
    dirty, clean = (Traffic(block_tokens=block_tokens) for _ in range(2))
    for number in range(num_requests):
        rules = chance.randrange(num_rules)
        before, behind = prose(rules, words_before), prose(100 + rules, words_behind)
        question = prose(1000 + number, chance.randrange(4, 30))
        changing = value(number) if has_value(number) else ""
        dirty.ask(chat(f"{before} {changing}{behind}", question))
        clean.ask(chat(f"{before} {behind}", question))
    return dirty, clean.hit_rate


@pytest.mark.parametrize("value", [stamp, nonce, session, counter])
@pytest.mark.parametrize("has_value", [everybody, every_second])
def test_the_hit_rate_without_the_value_is_predicted(
    value: Callable[[int], str], has_value: Callable[[int], bool]
) -> None:
    traffic, truth = run(value, has_value)
    found = hygiene(traffic)

    assert found["hit_rate"] == pytest.approx(traffic.hit_rate, abs=1e-3)
    assert found["model_hit_rate"] == pytest.approx(traffic.hit_rate, abs=1e-3)
    assert truth > traffic.hit_rate + 0.2
    assert found["predicted_hit_rate"] == pytest.approx(truth, abs=WITHIN)
    kinds: dict[Callable[[int], str], str]
    kinds = {stamp: "time stamp", nonce: "random value", session: "uuid", counter: "counter"}
    assert {each["kind"] for each in found["changes"]} == {kinds[value]}
    assert sum(each["requests"] for each in found["changes"]) == 40
    for each in found["changes"]:
        assert (each["message"], each["role"]) == (0, "system")


@settings(max_examples=15, deadline=None)
@example(1, 1, 63, 8, 1, 64, 0)  # all that is shared is one block
@example(1, 64, 40, 16, 1, 64, 1)
@given(
    num_rules=st.integers(1, 4),
    num_before=st.integers(0, 80),
    num_behind=st.integers(40, 300),
    longest=st.integers(1, 40),
    one_in=st.integers(1, 4),
    block_tokens=st.sampled_from([8, 16, 64]),
    seed=st.integers(0, 99),
)
def test_predictions_hold_wherever_it_stands_and_however_long_it_is(
    num_rules: int,
    num_before: int,
    num_behind: int,
    longest: int,
    one_in: int,
    block_tokens: int,
    seed: int,
) -> None:
    chance = random.Random(seed)
    dirty, clean = (Traffic(block_tokens=block_tokens) for _ in range(2))
    asked: list[list[int]] = []
    rules = [chance.choices(range(40_000), k=num_before + num_behind) for _ in range(num_rules)]
    for number in range(30):
        rule = chance.choice(rules)
        before, behind = rule[:num_before], rule[num_before:]
        question = chance.choices(range(40_000), k=chance.randrange(1, 60))
        value = chance.choices(range(40_000), k=chance.randrange(1, longest + 1))
        dirty.ask([*before, *(value if number % one_in == 0 else []), *behind, *question])
        asked.append([*before, *behind, *question])
        clean.ask(asked[-1])
    found = hygiene(dirty, spelling=None)

    # Where little is shared, a block is much of it: one block of two requests may be off.
    two_blocks = 2 * block_tokens / sum(map(len, asked))
    assert found["predicted_hit_rate"] == pytest.approx(
        clean.hit_rate, abs=max(WITHIN, two_blocks + 1e-4)
    )


def test_clean_traffic_has_nothing_to_remove() -> None:
    traffic, truth = run(stamp, lambda number: False)
    found = hygiene(traffic)

    assert found["changes"] == []
    assert found["predicted_hit_rate"] == found["hit_rate"] == pytest.approx(truth, abs=1e-3)


def test_two_places_that_change_are_both_named_and_removed() -> None:
    dirty, clean = Traffic(), Traffic()
    for number in range(40):
        question = prose(1000 + number, 12)
        first, second = prose(1, 80), prose(2, 120)
        dirty.ask(chat(f"{stamp(number)}{first} {session(number)}{second}", question))
        clean.ask(chat(f"{first} {second}", question))
    found = hygiene(dirty)

    assert {each["kind"] for each in found["changes"]} == {"time stamp", "uuid"}
    assert found["predicted_hit_rate"] == pytest.approx(clean.hit_rate, abs=WITHIN)
    alone = {each["kind"]: each["predicted_hit_rate_alone"] for each in found["changes"]}
    assert alone["uuid"] == pytest.approx(dirty.hit_rate, abs=0.01)
    assert dirty.hit_rate < alone["time stamp"] < found["predicted_hit_rate"]


def test_conversations_that_grow_are_no_changes() -> None:
    traffic = Traffic()
    for number in range(5):
        turns: list[str] = []
        for turn in range(5):
            turns += [prose(5000 + 10 * number + turn, 15), prose(6000 + 10 * number + turn, 30)]
            traffic.ask(chat(prose(1, 120), *turns[:-1]))
    found = hygiene(traffic)

    assert found["changes"] == []
    assert found["predicted_hit_rate"] == found["hit_rate"]


def test_conversations_with_a_clock_are_replayed_without_it() -> None:
    dirty, clean = Traffic(), Traffic()
    chance = random.Random(5)
    talks: list[list[str]] = [[] for _ in range(6)]
    for number in range(60):
        turns = talks[chance.randrange(len(talks))]
        turns += [prose(3000 + number, 15), prose(4000 + number, 25)]
        dirty.ask(chat(f"{stamp(number)}{prose(1, 80)}", *turns[:-1]))
        clean.ask(chat(prose(1, 80), *turns[:-1]))
    found = hygiene(dirty)

    assert clean.hit_rate > 0.6
    assert found["predicted_hit_rate"] == pytest.approx(clean.hit_rate, abs=WITHIN)


def test_words_that_change_before_shared_text_are_told_and_not_counted_as_removed() -> None:
    traffic = Traffic()
    for number in range(30):
        traffic.ask(chat(f"Question: {prose(1000 + number, 9)} Rules: {prose(1, 150)}", "go"))
    found = hygiene(traffic)

    [change] = found["changes"]
    assert change["kind"] == "text that changes"[:4]
    assert change["predicted_hit_rate_alone"] > 0.8
    assert found["predicted_hit_rate"] == found["hit_rate"]


def test_caches_that_evict_are_replayed_as_such() -> None:
    shapes = {"block_tokens": 16, "cache_blocks": 60}
    dirty, clean = Traffic(**shapes), Traffic(**shapes)
    chance = random.Random(11)
    for number in range(80):
        rules = prose(chance.randrange(6), 200)
        question = prose(1000 + number, 10)
        dirty.ask(chat(f"{stamp(number)}{rules}", question))
        clean.ask(chat(rules, question))
    found = hygiene(dirty, cache_blocks=60)

    assert 0.3 < clean.hit_rate < 0.7
    assert found["predicted_hit_rate"] == pytest.approx(clean.hit_rate, abs=WITHIN)


def test_two_workers_each_have_a_cache_of_their_own() -> None:
    dirty, clean = Traffic(), Traffic()
    for number in range(40):
        at: dict[str, Any] = {"worker_id": f"w{number % 4}", "strategy": "round_robin"}
        question = prose(1000 + number, 10)
        dirty.ask(chat(f"{stamp(number)}{prose(1, 150)}", question), **at)
        clean.ask(chat(prose(1, 150), question), **at)
    found = hygiene(dirty)

    assert found["predicted_hit_rate"] == pytest.approx(clean.hit_rate, abs=WITHIN)


def test_a_model_that_does_not_fit_says_so() -> None:
    traffic = Traffic()
    for number in range(30):
        traffic.ask(chat(prose(1, 150), prose(1000 + number, 10)), cached_tokens=0)
    found = hygiene(traffic)

    assert found["faithful"] is False
    assert "take the prediction with care" in found["notes"][0]


def test_of_few_requests_nothing_is_said() -> None:
    traffic, _ = run(stamp, everybody, num_requests=4)
    found = hygiene(traffic)

    assert found["predicted_hit_rate"] is None
    assert found["notes"][0].startswith("not enough evidence: 4 answered requests")
    assert hygiene(Traffic())["hit_rate"] is None


def test_text_is_in_the_report_only_if_it_may_be() -> None:
    traffic, _ = run(nonce, everybody, num_requests=20)
    told = json.dumps(hygiene(traffic))
    shown = json.dumps(hygiene(traffic, show_text=True))

    assert "Request" not in told
    assert "Request" in shown


def test_without_the_models_vocabulary_places_are_tokens() -> None:
    traffic, truth = run(stamp, everybody)
    found = hygiene(traffic, spelling=None)

    assert found["predicted_hit_rate"] == pytest.approx(truth, abs=WITHIN)
    assert {each["kind"] for each in found["changes"]} == {None}

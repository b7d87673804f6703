"""Shares of a class: by weight, whoever asks how often."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fairness import FairLine, Rank

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0, "e": 10.0}


class Line:
    """A line, and who asks in it: items are (tenant, number)."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.line: FairLine[tuple[str, int]] = FairLine()
        self.line.configure(weights or {})
        self.waiting: Counter[str] = Counter()
        self.number = 0

    def ask(self, tenant: str, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            self.line.expect(tenant)
            self.line.add(tenant, (tenant, self.number), Rank(float(self.number), self.number))
            self.waiting[tenant] += 1

    def serve(self) -> str:
        item = self.line.next()
        assert item is not None
        self.line.take(item[0], item)
        self.waiting[item[0]] -= 1
        return item[0]

    def cancel(self, tenant: str, number: int) -> None:
        self.line.remove(tenant, (tenant, number))
        self.waiting[tenant] -= 1


def test_tenants_get_slots_in_proportion_to_their_weights() -> None:
    line = Line({"a": 1.0, "b": 2.0, "c": 5.0})
    for tenant in "abc":
        line.ask(tenant, 100)

    assert Counter(line.serve() for _ in range(80)) == {"a": 10, "b": 20, "c": 50}


def test_a_flood_of_one_does_not_hold_up_another() -> None:
    line = Line()
    line.ask("flood", 1000)
    line.ask("other", 3)

    served = [line.serve() for _ in range(7)]
    assert served.count("other") == 3


def test_serves_a_tenant_in_the_order_of_arrival() -> None:
    line = Line({"b": 2.0})
    line.ask("a", 5)
    line.ask("b", 5)
    numbers = defaultdict(list)
    while (item := line.line.next()) is not None:
        numbers[item[0]].append(item[1])
        line.line.take(item[0], item)

    assert numbers == {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10]}


def test_who_was_idle_has_nothing_saved_up() -> None:
    line = Line()
    line.ask("busy", 1000)
    line.ask("idle")
    for _ in range(500):
        line.serve()
    line.ask("idle", 100)

    assert Counter(line.serve() for _ in range(100))["idle"] == 50


def test_who_was_alone_owes_nothing() -> None:
    line = Line()
    line.ask("early", 500)
    for _ in range(400):
        line.serve()
    line.ask("late", 100)

    assert Counter(line.serve() for _ in range(100))["early"] == 50


def test_asking_one_at_a_time_gives_no_more_than_the_share() -> None:
    line = Line({"light": 0.25})
    line.ask("busy", 1000)
    served: Counter[str] = Counter()
    for _ in range(100):
        if not line.waiting["light"]:
            line.ask("light")
        served[line.serve()] += 1

    assert served["light"] == pytest.approx(20, abs=1)


def test_cancelling_and_asking_again_gains_nothing() -> None:
    line = Line({"light": 0.25})
    line.ask("busy", 1000)
    served: Counter[str] = Counter()
    for _ in range(100):
        line.ask("light")
        served[line.serve()] += 1
        if line.waiting["light"]:
            line.cancel("light", line.number)

    assert served["light"] <= 20


def test_ever_new_names_do_not_starve_one_that_waits() -> None:
    line = Line()
    line.ask("steady", 100)
    served: Counter[str] = Counter()
    for number in range(50):
        line.ask(f"new-{number}")
        served[line.serve()] += 1
        served[line.serve()] += 1

    assert served["steady"] == 50


def test_remembers_only_those_who_wait() -> None:
    line = Line()
    line.ask("steady", 2000)
    for number in range(1000):
        line.ask(f"name-{number}")
        line.serve()
        line.serve()
        assert line.line.num_tenants <= 2
    line.line.check_integrity()


def test_follows_a_change_of_weights_for_those_already_waiting() -> None:
    line = Line({"a": 0.01})
    line.ask("a", 100)
    line.ask("b", 100)
    assert Counter(line.serve() for _ in range(20))["a"] == 0
    line.line.configure({"a": 3.0})
    line.line.check_integrity()

    assert Counter(line.serve() for _ in range(40))["a"] == pytest.approx(30, abs=1)


Script = list[tuple[str, str]]
scripts = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "serve", "cancel"]), st.sampled_from("abcde")),
    max_size=150,
)


@given(scripts)
@settings(deadline=None)
def test_shares_differ_from_the_weights_by_one_request_each(script: Script) -> None:
    """While two tenants wait without a pause, |served / weight| differ by no more than one
    request of each, over any span.
    """
    line = Line(WEIGHTS)
    history: list[tuple[str, frozenset[str]]] = []  # who was served, and who waited then
    for step, tenant in script:
        if step == "ask":
            line.ask(tenant)
        elif step == "cancel":
            items = [item for item in line.line if item[0] == tenant]
            if items:
                line.cancel(*items[len(items) // 2])
        elif line.waiting.total():
            waited = frozenset(each for each, count in line.waiting.items() if count)
            history.append((line.serve(), waited))
        line.line.check_integrity()
    check_bound(history)


def check_bound(history: list[tuple[str, frozenset[str]]]) -> None:
    weights = {tenant: Fraction(weight) for tenant, weight in WEIGHTS.items()}
    for first in weights:
        for second in weights:
            # The difference since any moment of a span is its last less its lowest.
            lag = lowest = Fraction(0)
            for served, waited in history:
                if not {first, second} <= waited:
                    lag = lowest = Fraction(0)
                    continue
                lag += (served == first) / weights[first] - (served == second) / weights[second]
                lowest = min(lowest, lag)
                slack = Fraction(1, 10**9)
                assert lag - lowest <= 1 / weights[first] + 1 / weights[second] + slack


class Textbook:
    """Self-clocked fair queueing as it was published: each request's end is known when it
    arrives, and nobody is ever forgotten.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.ends: dict[str, float] = {}
        self.virtual = 0.0
        self.waiting: list[tuple[float, int, str]] = []

    def ask(self, tenant: str, number: int) -> None:
        start = max(self.ends.get(tenant, 0.0), self.virtual)
        self.ends[tenant] = start + 1 / self.weights[tenant]
        self.waiting.append((self.ends[tenant], number, tenant))

    def serve(self) -> str:
        end, number, tenant = min(self.waiting)
        self.waiting.remove((end, number, tenant))
        self.virtual = end
        return tenant


@pytest.mark.parametrize("seed", range(200))
def test_forgetting_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    weights = {tenant: rng.choice([0.25, 0.5, 1.0, 2.0, 4.0]) for tenant in "abcd"}
    line, textbook = Line(weights), Textbook(weights)
    for _ in range(200):
        if rng.random() < 0.5 or not textbook.waiting:
            tenant = rng.choice("aaabbcd")
            line.ask(tenant)
            textbook.ask(tenant, line.number)
        else:
            assert line.serve() == textbook.serve()


@pytest.mark.parametrize("seed", range(100))
def test_foretells_how_many_go_before(seed: int) -> None:
    """By less than one request of each other tenant."""
    rng = random.Random(seed)
    line = Line(WEIGHTS)
    for _ in range(rng.randrange(100)):
        if rng.random() < 0.6:
            line.ask(rng.choice("aaabcde"))
        elif line.waiting.total():
            line.serve()
    newcomer = rng.choice("abcde")
    others = sum(count > 0 for tenant, count in line.waiting.items() if tenant != newcomer)
    expected = line.line.ahead_of_next(newcomer)
    line.ask(newcomer)
    last, ahead = (newcomer, line.number), 0
    while line.line.next() != last:
        line.serve()
        ahead += 1

    assert ahead - 1e-9 <= expected <= ahead + others

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet import Fleet, Worker
from router.knowledge import REPORT_PATIENCE_S, AnnouncedStore, Errand, Knowledge
from router.kv_aware import KvAware
from router.prompt import Choice, Prompt
from router.reports import EvictedEvent, LoadEvent, Report, SnapshotEvent, StoredEvent
from tests.router.chains import BLOCK_TOKENS, key, keys_of, make_prompt
from tests.router.fleets import announce, make_fleet

MEASURED = LoadEvent(prefill_tokens_per_s=1000.0)


class Scene:
    """A few workers, and a strategy that knows them."""

    def __init__(self, *names: str, max_blocks: int = 10_000) -> None:
        self.fleet = make_fleet(*names, num_slots=1000)
        self.knowledge = Knowledge(max_blocks)
        self.knowledge.update_workers(self.fleet.workers)
        self.strategy = KvAware(self.knowledge, step_tokens=512)

    def hear(self, name: str, sequence: int, event: object, now_s: float = 0.0) -> bool:
        return self.knowledge.hear(name, Report(sequence, "life", event), now_s)  # type: ignore[arg-type]

    def choose(self, prompt: Prompt, now_s: float = 0.0) -> Choice:
        return self.strategy.choose(self.fleet.candidates(now_s), prompt, now_s)

    def worker(self, name: str) -> Worker:
        [found] = [each for each in self.fleet.workers if each.announced.id == name]
        return found

    def send(self, prompt: Prompt, now_s: float = 0.0, *, to: str = "") -> tuple[Choice, Errand]:
        choice = self.choose(prompt, now_s)
        if to:
            choice = choice._replace(
                worker=self.worker(to),
                predicted_tokens=0,
                uncached_tokens=prompt.num_tokens,
                work_s=prompt.num_tokens / 1000,
            )
        return choice, self.knowledge.begin(choice, prompt, now_s)

    def predicted(self, prompt: Prompt, now_s: float = 0.0) -> dict[str, int]:
        """Tokens by the worker, where there are some."""
        explaining = KvAware(self.knowledge, step_tokens=512, explain=True)
        considered = explaining.choose(self.fleet.workers, prompt, now_s).considered
        return {
            each.worker_id: each.predicted_tokens for each in considered if each.predicted_tokens
        }


def end(errand: Errand, now_s: float, *, cached: int = 0, evaluated: int = 0) -> None:
    errand.first_token(now_s)
    errand.finished(
        cached_tokens=cached, evaluated_tokens=evaluated, loaded_blocks=0, load_s=0.0, now_s=now_s
    )
    errand.release(now_s)


@pytest.fixture
def scene() -> Scene:
    scene = Scene("a", "b", "c")
    for name in "abc":
        assert scene.hear(name, 0, SnapshotEvent((), MEASURED))
    return scene


def test_what_workers_report_is_known(scene: Scene) -> None:
    scene.hear("a", 1, StoredEvent(keys_of(1, 2, 3)))
    scene.hear("b", 1, StoredEvent(keys_of(1)))
    assert scene.predicted(make_prompt(1, 2, 3)) == {"a": 192, "b": 64}

    scene.hear("a", 2, EvictedEvent(keys_of(1, 2, 3)[1:]))
    assert scene.predicted(make_prompt(1, 2, 3)) == {"a": 64, "b": 64}


def test_the_last_token_is_never_expected_to_be_cached(scene: Scene) -> None:
    scene.hear("a", 1, StoredEvent(keys_of(1, 2)))

    assert scene.predicted(make_prompt(1, 2, more_tokens=0)) == {"a": 64}


def test_a_prompt_on_its_way_is_expected_where_it_was_sent(scene: Scene) -> None:
    choice, errand = scene.send(make_prompt(1, 2, 3))
    assert scene.predicted(make_prompt(1, 2, 9)) == {choice.worker.announced.id: 128}

    errand.release(1.0)
    assert scene.predicted(make_prompt(1, 2, 9)) == {}
    scene.knowledge.check_idle()


def test_a_prediction_is_confirmed_by_the_report(scene: Scene) -> None:
    prompt = make_prompt(1, 2)
    _, errand = scene.send(prompt, to="a")
    scene.hear("a", 1, StoredEvent(keys_of(1, 2)))
    end(errand, 1.0, evaluated=129)
    scene.hear("a", 1, MEASURED, 100.0)

    assert scene.predicted(prompt, 100.0) == {"a": 128}


def test_a_prediction_that_no_report_confirms_runs_out(scene: Scene) -> None:
    prompt = make_prompt(1, 2)
    _, errand = scene.send(prompt, to="a")
    end(errand, 1.0, evaluated=129)
    assert scene.predicted(prompt, 1.0) == {"a": 128}

    scene.hear("a", 0, MEASURED, 1.0 + REPORT_PATIENCE_S)
    assert scene.predicted(prompt, 10.0) == {}


def test_without_reports_the_router_goes_by_what_it_has_sent() -> None:
    scene = Scene("a", "b")
    prompt = make_prompt(1, 2)
    _, errand = scene.send(prompt, to="b")
    end(errand, 1.0, evaluated=129)

    assert scene.predicted(prompt, 1000.0) == {"b": 128}
    assert scene.knowledge.counts.unreported == 1
    assert scene.knowledge.num_live_feeds == 0


def test_a_gap_is_told_and_what_was_known_stays_until_the_snapshot(scene: Scene) -> None:
    scene.hear("a", 1, StoredEvent(keys_of(1)))
    assert not scene.hear("a", 3, StoredEvent(keys_of(5)))
    assert scene.knowledge.counts.gaps == 1
    assert scene.predicted(make_prompt(1)) == {"a": 64}
    assert scene.predicted(make_prompt(5)) == {}

    assert scene.hear("a", 4, SnapshotEvent(keys_of(7), MEASURED))
    assert scene.predicted(make_prompt(1)) == {}
    assert scene.predicted(make_prompt(7)) == {"a": 64}


def test_a_large_snapshot_comes_in_parts(scene: Scene) -> None:
    scene.hear("a", 1, SnapshotEvent(keys_of(1)))
    scene.hear("a", 1, SnapshotEvent(keys_of(2), continues=True))

    assert scene.predicted(make_prompt(1)) == {"a": 64}
    assert scene.predicted(make_prompt(2)) == {"a": 64}
    assert scene.knowledge.counts.snapshots == 4


def test_a_snapshot_forgets_nothing_that_is_on_its_way(scene: Scene) -> None:
    prompt = make_prompt(1, 2)
    _, errand = scene.send(prompt, to="a")
    scene.hear("a", 5, SnapshotEvent(()))
    assert scene.predicted(prompt) == {"a": 128}

    errand.release(1.0)
    assert scene.predicted(prompt) == {}
    scene.knowledge.check_idle()


def test_a_worker_that_left_is_forgotten_and_its_reports_are_passed_over(scene: Scene) -> None:
    scene.hear("a", 1, StoredEvent(keys_of(1)))
    _, errand = scene.send(make_prompt(9), to="a")
    scene.fleet.update([announce("b"), announce("c")])
    scene.knowledge.update_workers(scene.fleet.workers)

    assert scene.hear("a", 2, StoredEvent(keys_of(2)))
    assert scene.predicted(make_prompt(1)) == {}
    end(errand, 1.0)
    scene.knowledge.check_idle()


def test_ten_flaps_a_second_leave_nothing_behind() -> None:
    scene = Scene("stays")
    for flap in range(100):
        scene.fleet.update([announce("stays"), announce(f"flaps-{flap}")])
        scene.knowledge.update_workers(scene.fleet.workers)
        scene.hear(f"flaps-{flap}", 0, SnapshotEvent(keys_of(*range(50)), MEASURED))
        scene.fleet.update([announce("stays")])
        scene.knowledge.update_workers(scene.fleet.workers)
    for _ in range(20):
        scene.hear("stays", 0, SnapshotEvent(()))

    assert len(scene.knowledge.index) == 0
    assert list(scene.knowledge.views) == list(scene.fleet.workers)
    scene.knowledge.check_idle()


def test_predictions_are_compared_with_what_came(scene: Scene) -> None:
    scene.hear("a", 1, StoredEvent(keys_of(1, 2, 3)))
    prompt = make_prompt(1, 2, 3)
    choice, errand = scene.send(prompt)
    assert choice.worker.announced.id == "a"
    end(errand, 1.0, cached=64, evaluated=129)

    counts = scene.knowledge.counts
    assert (counts.decisions, counts.unreported) == (1, 0)
    assert (counts.predicted_tokens, counts.cached_tokens) == (192, 64)
    assert (counts.overpredicted_tokens, counts.underpredicted_tokens) == (128, 0)


@pytest.mark.parametrize(("announced", "reported"), [(400, 0), (400, 1 << 20), (0, 400)])
def test_a_worker_that_reports_more_than_it_can_hold_drives_no_other_out(
    announced: int, reported: int
) -> None:
    scene = Scene("honest", "liar", max_blocks=4_000)
    scene.fleet.update([announce("honest"), announce("liar", num_blocks=announced)])
    scene.hear("honest", 0, SnapshotEvent(keys_of(*range(500)), MEASURED))
    scene.hear("liar", 0, SnapshotEvent((), MEASURED._replace(num_blocks_total=reported)))

    for sequence in range(1, 11):
        false = tuple(key(sequence, number) for number in range(500))
        scene.hear("liar", sequence, StoredEvent(false))
    assert scene.predicted(make_prompt(*range(500))) == {"honest": 500 * 64}
    assert len(scene.knowledge.index) == 500 + 440
    scene.hear("liar", 10, SnapshotEvent(tuple(key(0, number) for number in range(5_000))))
    assert scene.predicted(make_prompt(*range(500))) == {"honest": 500 * 64}
    scene.knowledge.check_idle()


def test_a_node_s_store_is_known_to_the_workers_of_its_host() -> None:
    fleet = Fleet()
    fleet.update([announce("a", address="near:1"), announce("b", address="far:1")])
    knowledge = Knowledge(1000)
    knowledge.update_workers(fleet.workers)
    knowledge.update_stores([AnnouncedStore("kv", "near")])
    for name in ("a", "b"):
        knowledge.hear(name, Report(0, "x", SnapshotEvent((), MEASURED)), 0.0)
    knowledge.hear("kv", Report(0, "x", SnapshotEvent(keys_of(1, 2, 3))), 0.0)

    choice = KvAware(knowledge, step_tokens=512).choose(fleet.workers, make_prompt(1, 2, 3), 0.0)
    assert choice.worker.announced.id == "a"
    assert choice.predicted_tokens == 0
    assert choice.work_s < 193 / 1000

    knowledge.update_stores([])
    assert knowledge.views[choice.worker].store is None


def test_who_joins_is_not_flooded() -> None:
    scene = Scene("a", "b")
    for number in range(40):
        _, errand = scene.send(make_prompt(number), float(number))
        end(errand, float(number), evaluated=65)
    scene.fleet.update([announce("a"), announce("b"), announce("new")])
    scene.knowledge.update_workers(scene.fleet.workers)

    chosen: list[Worker] = []
    for number in range(100, 130):
        choice, errand = scene.send(make_prompt(number), float(number))
        end(errand, float(number), evaluated=65)
        chosen.append(choice.worker)
    assert 8 <= sum(worker.announced.id == "new" for worker in chosen) <= 14


def test_block_size_is_the_prompt_s_own(scene: Scene) -> None:
    assert make_prompt(1).block_tokens == BLOCK_TOKENS


def test_without_reports_a_prompt_that_waited_behind_another_tells_no_speed() -> None:
    scene = Scene("a")
    load = scene.knowledge.views[scene.worker("a")].load
    prompt = make_prompt(0, more_tokens=36)
    _, first = scene.send(prompt, 0.0, to="a")
    _, second = scene.send(prompt, 0.0, to="a")
    end(first, 1.0)
    end(second, 2.0)
    assert load.token_s == pytest.approx(1 / prompt.num_tokens)


def test_workers_that_come_and_go_unheard_leave_nothing_behind() -> None:
    scene = Scene()
    for number in range(100):
        scene.fleet.update([announce(f"worker {number}")])
        scene.knowledge.update_workers(scene.fleet.workers)
    _, errand = scene.send(make_prompt(100), to="worker 99")
    end(errand, 1.0)
    scene.knowledge.check_idle()
    assert scene.knowledge.views[scene.worker("worker 99")].bit < 2


RATES = st.sampled_from([0.0, -1.0, math.nan, math.inf, 5e-324, 1e-9, 1e308]) | st.floats()
COUNTS = st.sampled_from([0, 1, 2**64 - 1])
LOADS = st.builds(LoadEvent, COUNTS, COUNTS, COUNTS, RATES, COUNTS, COUNTS)
PASSING_S = st.floats(0.0, 1e4) | st.just(1e9)


@given(st.lists(st.tuples(st.sampled_from("abc"), LOADS, COUNTS, RATES, PASSING_S), max_size=8))
def test_no_report_and_no_answer_makes_a_cost_that_is_no_number(
    lies: list[tuple[str, LoadEvent, int, float, float]],
) -> None:
    scene, now_s = Scene("a", "b", "c"), 0.0
    for name, load, count, load_s, passing_s in lies:
        scene.hear(name, 0, SnapshotEvent((), load), now_s)
        choice, errand = scene.send(make_prompt(1, 2, 3), now_s)
        now_s += passing_s
        errand.first_token(now_s)
        errand.finished(
            cached_tokens=count,
            evaluated_tokens=count,
            loaded_blocks=count,
            load_s=load_s,
            now_s=now_s,
        )
        errand.release(now_s)
        costs_s = [choice.cost_s, choice.work_s]
        costs_s += [view.load.recent_s for view in scene.knowledge.views.values()]
        assert all(0.0 <= cost_s < math.inf for cost_s in costs_s), costs_s
    scene.knowledge.check_idle()

from __future__ import annotations

from collections import Counter

import pytest

from router.reports import LoadEvent, SnapshotEvent, StoredEvent
from tests.router.chains import keys_of, make_prompt
from tests.router.test_knowledge import MEASURED, Scene, end

LONG = tuple(range(1, 41))  # 40 blocks: 2.56 s of computing


@pytest.fixture
def scene() -> Scene:
    scene = Scene("a", "b", "c", "d")
    for name in "abcd":
        scene.hear(name, 0, SnapshotEvent((), MEASURED))
    return scene


def test_a_prompt_goes_where_most_of_it_is_cached(scene: Scene) -> None:
    scene.hear("b", 1, StoredEvent(keys_of(*LONG[:10])))
    scene.hear("c", 1, StoredEvent(keys_of(*LONG)))

    choice = scene.choose(make_prompt(*LONG))
    assert choice.worker.announced.id == "c"
    assert choice.predicted_tokens == 40 * 64
    assert choice.uncached_tokens == 1


def test_a_queue_outweighs_a_prefix_that_is_worth_less(scene: Scene) -> None:
    scene.hear("c", 1, StoredEvent(keys_of(1, 2)))
    scene.send(make_prompt(*range(100, 140)), to="c")

    assert scene.choose(make_prompt(1, 2, 3, 4)).worker.announced.id != "c"


def test_a_short_wait_is_worth_a_long_prefix(scene: Scene) -> None:
    """Workers let short prompts pass long ones: the queue counts only so far."""
    scene.hear("c", 1, StoredEvent(keys_of(*LONG)))
    for name in "abd":  # all have had as much, and done it
        _, errand = scene.send(make_prompt(*range(100, 180)), to=name)
        end(errand, 0.0, evaluated=80 * 64 + 1)
    scene.send(make_prompt(*range(200, 280)), to="c")

    assert scene.choose(make_prompt(*LONG)).worker.announced.id == "c"


def test_prompts_that_all_begin_alike_do_not_all_go_to_one_worker(scene: Scene) -> None:
    counts: Counter[str] = Counter()
    for number in range(400):
        choice, errand = scene.send(make_prompt(0, number, 1, 2, 3), number * 1.0)
        counts[choice.worker.announced.id] += choice.uncached_tokens
        end(
            errand,
            number * 1.0,
            cached=choice.predicted_tokens or 0,
            evaluated=choice.uncached_tokens,
        )

    mean = counts.total() / 4
    assert all(abs(count - mean) < 0.03 * mean for count in counts.values())


def test_a_hot_prefix_comes_to_be_at_several_workers(scene: Scene) -> None:
    """When it is asked for more often than one can answer."""
    scene.hear("a", 1, StoredEvent(keys_of(*LONG)))
    chosen = set()
    for number in range(60):
        choice, _ = scene.send(make_prompt(*LONG, more_tokens=600), number * 0.01)
        chosen.add(choice.worker.announced.id)

    assert len(chosen) >= 3


def test_equals_take_turns(scene: Scene) -> None:
    chosen = []
    for _ in range(8):
        choice = scene.choose(make_prompt(1))
        scene.fleet.take(choice.worker)
        chosen.append(choice.worker.announced.id)

    assert Counter(chosen) == {"a": 2, "b": 2, "c": 2, "d": 2}


def test_a_fast_worker_gets_what_nobody_has(scene: Scene) -> None:
    scene.hear("d", 0, LoadEvent(prefill_tokens_per_s=5000.0))

    assert scene.choose(make_prompt(*LONG)).worker.announced.id == "d"


def test_work_of_other_routers_is_avoided(scene: Scene) -> None:
    for name in "abc":
        scene.hear(name, 0, MEASURED._replace(queued_prompt_tokens=20_000))

    assert scene.choose(make_prompt(*LONG)).worker.announced.id == "d"


def test_who_has_no_room_for_its_kv_is_avoided(scene: Scene) -> None:
    scene.knowledge.views[scene.fleet.workers[0]].load.learn_residence(5.0)
    full = MEASURED._replace(num_blocks_reserved=95, num_blocks_total=100)
    roomy = MEASURED._replace(num_blocks_reserved=5, num_blocks_total=100)
    for view in scene.knowledge.views.values():
        view.load.learn_residence(5.0)
    for name, load in (("a", full), ("b", full), ("c", roomy), ("d", full)):
        scene.hear(name, 0, load)

    assert scene.choose(make_prompt(*LONG)).worker.announced.id == "c"


def test_a_worker_that_lies_loses_its_attraction(scene: Scene) -> None:
    scene.hear("a", 1, StoredEvent(keys_of(*LONG)))
    chosen = []
    for number in range(20):
        choice, errand = scene.send(make_prompt(*LONG), number * 10.0)
        chosen.append(choice.worker.announced.id)
        cached = 0 if chosen[-1] == "a" else choice.predicted_tokens or 0
        end(errand, number * 10.0, cached=cached, evaluated=make_prompt(*LONG).num_tokens - cached)

    assert chosen[0] == "a"
    assert chosen[10:].count("a") <= 3


def test_what_another_worker_has_is_told_with_the_choice(scene: Scene) -> None:
    scene.hear("b", 1, StoredEvent(keys_of(*LONG[:10])))
    scene.hear("c", 1, StoredEvent(keys_of(*LONG)))
    first, *_, last = scene.fleet.workers

    assert scene.choose(make_prompt(*LONG)).best_elsewhere_tokens == 10 * 64
    # Though it could not be chosen just then.
    elsewhere = scene.strategy.choose([first, last], make_prompt(*LONG), 0.0)
    assert elsewhere.best_elsewhere_tokens == 40 * 64
    assert scene.choose(make_prompt(7, 8)).best_elsewhere_tokens == 0


def test_only_candidates_are_chosen(scene: Scene) -> None:
    scene.hear("a", 1, StoredEvent(keys_of(*LONG)))
    [_, *others] = scene.fleet.workers

    assert scene.strategy.choose(others, make_prompt(*LONG), 0.0).worker in others


def test_a_prompt_shorter_than_a_block_has_no_worker_of_its_own(scene: Scene) -> None:
    choice = scene.choose(make_prompt(more_tokens=10))

    assert choice.predicted_tokens == 0
    assert choice.uncached_tokens == 10


def test_of_thousands_of_workers_some_are_compared_and_all_get_their_turn() -> None:
    scene = Scene(*(f"w{number}" for number in range(2000)))
    scene.hear("w77", 0, SnapshotEvent(keys_of(*LONG), MEASURED))
    assert scene.choose(make_prompt(*LONG)).worker.announced.id == "w77"

    chosen = set()
    for number in range(1000):
        choice, errand = scene.send(make_prompt(number), number * 0.01)
        scene.fleet.take(choice.worker)
        end(errand, number * 0.01, evaluated=65)
        chosen.add(choice.worker)
    assert choice.num_candidates <= 512
    assert len(chosen) == 1000


@pytest.mark.parametrize("times_slower", [5.0, 100.0])
def test_a_worker_that_was_cold_at_first_soon_gets_its_share(times_slower: float) -> None:
    scene = Scene("a", "b")
    scene.hear("a", 0, SnapshotEvent((), LoadEvent(prefill_tokens_per_s=1000 / times_slower)))
    scene.hear("b", 0, SnapshotEvent((), MEASURED))
    counts: Counter[str] = Counter()
    for number in range(80):
        now_s = number / 10
        choice, errand = scene.send(make_prompt(number), now_s)
        end(errand, now_s, evaluated=choice.uncached_tokens)
        name = choice.worker.announced.id
        scene.hear(name, 0, MEASURED, now_s)
        counts[name] += now_s > 4.0

    assert abs(counts["a"] - counts["b"]) <= 4

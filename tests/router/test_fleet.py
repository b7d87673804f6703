from __future__ import annotations

import random

import pytest

from router.fleet import FIRST_SUSPICION_S, FULL_PAUSE_S, LONGEST_SUSPICION_S, Fleet, Slot
from tests.router.fleets import announce, make_fleet


def names(fleet: Fleet, now_s: float = 0.0) -> str:
    return "".join(sorted(worker.announced.id for worker in fleet.candidates(now_s)))


def test_knows_the_ready_workers_of_the_membership() -> None:
    fleet = Fleet()
    fleet.update([announce("a"), announce("b", ready=False), announce("c")])

    assert names(fleet) == "ac"
    assert fleet.room(0.0) == 16


def test_a_worker_without_a_free_slot_is_no_candidate_until_one_is_released() -> None:
    fleet = make_fleet("a", "b", num_slots=2)
    a, _ = fleet.workers
    first, _ = fleet.take(a), fleet.take(a)

    assert names(fleet) == "b"
    first.release()
    assert names(fleet) == "ab"


def test_releasing_twice_counts_once() -> None:
    fleet = make_fleet("a")
    with fleet.take(fleet.workers[0]) as slot:
        slot.release()
    fleet.check_integrity()

    assert fleet.num_in_flight == 0


def test_tells_when_a_worker_has_room() -> None:
    events: list[str] = []
    fleet = Fleet(on_room=lambda: events.append(names(fleet)))
    fleet.update([announce("a", num_slots=1)])
    with fleet.take(fleet.workers[0]):
        assert events == []

    assert events == ["a"]


def test_a_worker_that_leaves_is_no_candidate_but_counted_until_its_requests_end() -> None:
    fleet = make_fleet("a", "b")
    slot = fleet.take(fleet.workers[0])
    fleet.update([announce("b")])
    fleet.check_integrity()

    assert names(fleet) == "b"
    assert fleet.num_in_flight == 1
    slot.release()
    fleet.check_integrity()
    assert len(fleet.workers) == 1


def test_a_worker_that_comes_back_still_has_its_requests() -> None:
    fleet = make_fleet("a")
    slot = fleet.take(fleet.workers[0])
    fleet.update([])
    fleet.update([announce("a", num_slots=1)])

    assert names(fleet) == ""
    slot.release()
    fleet.check_integrity()
    assert names(fleet) == "a"


def test_a_suspected_worker_is_avoided_for_a_time_that_doubles() -> None:
    fleet = make_fleet("a", "b")
    a, _ = fleet.workers
    fleet.suspect(a, 0.0)

    assert names(fleet, 0.0) == "b"
    assert fleet.next_return_s(0.0) == FIRST_SUSPICION_S
    assert names(fleet, FIRST_SUSPICION_S) == "ab"
    fleet.suspect(a, 10.0)
    assert fleet.next_return_s(10.0) == 10.0 + 2 * FIRST_SUSPICION_S
    for number in range(20):
        fleet.suspect(a, 100.0 * number)
    assert fleet.next_return_s(1900.0) == 1900.0 + LONGEST_SUSPICION_S


def test_calls_that_fail_together_count_as_one_failure() -> None:
    fleet = make_fleet("a")
    for _ in range(8):
        fleet.suspect(fleet.workers[0], 0.0)

    assert fleet.next_return_s(0.0) == FIRST_SUSPICION_S


def test_a_worker_that_failed_gets_one_request_until_it_answers() -> None:
    fleet = make_fleet("a", num_slots=4)
    (a,) = fleet.workers
    fleet.suspect(a, 0.0)
    fleet.take(a)

    assert fleet.room(LONGEST_SUSPICION_S) == 0
    fleet.trust(a)
    assert fleet.room(LONGEST_SUSPICION_S) == 3


def test_the_same_membership_again_does_not_end_suspicion() -> None:
    fleet = make_fleet("a", "b")
    fleet.suspect(fleet.workers[0], 0.0)
    fleet.update([announce("a"), announce("b"), announce("c")])

    assert names(fleet, 0.0) == "bc"


def test_a_worker_that_becomes_ready_again_is_no_longer_suspected() -> None:
    fleet = make_fleet("a")
    fleet.suspect(fleet.workers[0], 0.0)
    fleet.update([announce("a", ready=False)])
    fleet.update([announce("a")])

    assert fleet.room(0.0) == 8


def test_a_full_worker_is_left_alone_for_a_moment_and_not_suspected() -> None:
    fleet = make_fleet("a")
    fleet.pause(fleet.workers[0], 0.0)

    assert fleet.room(0.0) == 0
    assert fleet.room(FULL_PAUSE_S) == 8


def test_is_deserted_without_a_worker_to_wait_for() -> None:
    fleet = make_fleet("a", num_slots=1)
    assert not fleet.is_deserted(0.0)
    fleet.take(fleet.workers[0])
    assert not fleet.is_deserted(0.0)  # busy

    fleet.suspect(fleet.workers[0], 0.0)
    assert fleet.is_deserted(0.0)
    fleet.update([announce("a", ready=False)])
    assert fleet.is_deserted(FIRST_SUSPICION_S)


def test_bounds_the_context_by_the_smallest_worker() -> None:
    fleet = Fleet()
    assert fleet.max_context_tokens() is None
    fleet.update([announce("a", max_context_tokens=4096), announce("b", max_context_tokens=512)])

    assert fleet.max_context_tokens() == 512


@pytest.mark.parametrize("seed", range(20))
def test_every_count_is_zero_when_nothing_runs(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet()
    slots: list[Slot] = []
    for step in range(300):
        now_s = step / 10
        match rng.randrange(6):
            case 0:
                fleet.update(
                    announce(name, ready=rng.random() < 0.8, num_slots=rng.randint(1, 3))
                    for name in "abcde"
                    if rng.random() < 0.7
                )
            case 1 | 2 if candidates := fleet.candidates(now_s):
                slots.append(fleet.take(rng.choice(candidates)))
            case 3 if slots:
                slots.pop(rng.randrange(len(slots))).release()
            case 4 if fleet.workers:
                fleet.suspect(rng.choice(fleet.workers), now_s)
            case 5 if fleet.workers:
                fleet.trust(rng.choice(fleet.workers))
        fleet.check_integrity()
        assert fleet.num_in_flight == len(slots)
    for slot in slots:
        slot.release()
    fleet.update([])
    fleet.check_integrity()

    assert fleet.num_in_flight == 0
    assert fleet.workers == ()


def test_a_failure_told_of_a_worker_that_has_left_leaves_nothing_behind() -> None:
    fleet = make_fleet("a")
    (worker,) = fleet.workers
    fleet.update([])
    fleet.suspect(worker, now_s=0.0)
    fleet.check_integrity()
    assert fleet.candidates(10.0) == []

from __future__ import annotations

from kvstore.redis_breaker import Circuit, CircuitBreaker


def test_a_closed_circuit_lets_all_calls_through() -> None:
    breaker = CircuitBreaker(open_s=1)

    assert all(breaker.admit() for _ in range(10))
    assert breaker.num_refused == 0


def test_one_failure_opens_it_and_calls_are_refused_and_counted() -> None:
    breaker = CircuitBreaker(open_s=1)
    breaker.failed(now_s=10)

    assert breaker.state is Circuit.OPEN
    assert [breaker.admit() for _ in range(3)] == [False] * 3
    assert (breaker.num_opened, breaker.num_refused) == (1, 3)


def test_a_trial_is_due_after_its_time_and_only_one() -> None:
    breaker = CircuitBreaker(open_s=1)
    breaker.failed(now_s=10)

    assert breaker.trial_due_in_s(10.25) == 0.75
    assert not breaker.begin_trial(10.99)
    assert breaker.begin_trial(11)
    assert breaker.state is Circuit.HALF_OPEN
    assert not breaker.begin_trial(12)
    assert not breaker.admit()
    assert breaker.num_trials == 1


def test_a_trial_that_succeeds_closes_it() -> None:
    breaker = CircuitBreaker(open_s=1)
    breaker.failed(now_s=10)
    breaker.begin_trial(11)
    breaker.trial_succeeded()

    assert breaker.is_closed
    assert breaker.admit()


def test_a_trial_that_fails_opens_it_for_as_long_again() -> None:
    breaker = CircuitBreaker(open_s=1)
    breaker.failed(now_s=10)
    breaker.begin_trial(11)
    breaker.failed(now_s=13)

    assert breaker.state is Circuit.OPEN
    assert breaker.trial_due_in_s(13) == 1
    assert breaker.num_opened == 1


def test_calls_that_fail_late_do_not_put_off_the_trial() -> None:
    breaker = CircuitBreaker(open_s=1)
    breaker.failed(now_s=10)
    breaker.failed(now_s=10.9)

    assert breaker.begin_trial(11)


def test_an_old_success_does_not_close_an_open_circuit() -> None:
    breaker = CircuitBreaker(open_s=1)
    breaker.failed(now_s=10)
    breaker.trial_succeeded()

    assert breaker.state is Circuit.OPEN


def test_one_that_begins_open_waits_for_its_first_trial() -> None:
    breaker = CircuitBreaker(open_s=1, state=Circuit.OPEN)

    assert not breaker.admit()
    assert breaker.begin_trial(0)
    assert breaker.num_opened == 0

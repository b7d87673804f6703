from __future__ import annotations

from services.cli.restarts import RestartPolicy


def test_each_crash_in_a_row_waits_twice_as_long_up_to_the_longest() -> None:
    policy = RestartPolicy(max_crashes=4, first_delay_s=1.0, max_delay_s=3.0)

    assert [policy.crashed(float(now)) for now in range(4)] == [1.0, 2.0, 3.0, 3.0]


def test_one_crash_too_many_in_the_window_gives_up() -> None:
    policy = RestartPolicy(max_crashes=2, window_s=60.0)

    delays = [policy.crashed(now) for now in (0.0, 30.0, 59.0)]

    assert delays[1] is not None
    assert delays[2] is None


def test_old_crashes_are_forgiven() -> None:
    policy = RestartPolicy(max_crashes=2, window_s=60.0, first_delay_s=1.0)
    policy.crashed(0.0)
    policy.crashed(1.0)

    assert policy.crashed(61.5) == 1.0

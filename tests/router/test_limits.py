from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.limits import CONCURRENT_RETRY_S, Lease, TenantLimits
from services.core.errors import Overloaded
from services.core.settings import TenantSettings
from services.core.tenants import ANYBODY

# Binary fractions: floating-point sums of them are exact.
EIGHTHS = st.integers(0, 40).map(lambda count: count / 8)


def make_limits(**settings: Any) -> TenantLimits:
    return TenantLimits({"acme": TenantSettings(**settings)}, 0)


def refused(limits: TenantLimits, now_s: float = 0) -> Overloaded:
    with pytest.raises(Overloaded) as refusal:
        limits.enter("acme", now_s)
    limits.check_integrity()
    return refusal.value


def admits(limits: TenantLimits, now_s: float) -> Lease | None:
    try:
        return limits.enter("acme", now_s)
    except Overloaded:
        return None


@given(
    pauses_s=st.lists(EIGHTHS, max_size=40),
    requests_per_s=st.sampled_from([0.25, 0.5, 1.0, 4.0]),
    burst_requests=st.integers(1, 5),
)
def test_admits_all_that_no_span_of_time_has_too_much_of(
    pauses_s: list[float], requests_per_s: float, burst_requests: int
) -> None:
    limits = make_limits(requests_per_s=requests_per_s, burst_requests=burst_requests)
    admitted_s: list[float] = []
    now_s = 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        fits = all(
            len(admitted_s) - index + 1 <= burst_requests + requests_per_s * (now_s - start_s)
            for index, start_s in enumerate(admitted_s)
        )
        lease = admits(limits, now_s)
        assert (lease is not None) is fits
        if lease is not None:
            admitted_s.append(now_s)
        limits.check_integrity()


@given(
    pauses_s=st.lists(EIGHTHS, max_size=20),
    requests_per_s=st.sampled_from([0.125, 0.5, 2.0]),
    burst_requests=st.integers(1, 3),
)
def test_who_comes_back_when_told_is_admitted_and_no_sooner(
    pauses_s: list[float], requests_per_s: float, burst_requests: int
) -> None:
    limits = make_limits(requests_per_s=requests_per_s, burst_requests=burst_requests)
    now_s = 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        if admits(limits, now_s) is None:
            delay_s = refused(limits, now_s).retry_delay_s
            assert delay_s is not None
            assert 0 < delay_s <= 1 / requests_per_s
            refused(limits, now_s + delay_s / 2)
            now_s += delay_s
            assert admits(limits, now_s)


STEPS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from("abc")),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("configure"), st.dictionaries(st.sampled_from("abc"), st.integers(0, 3))),
)


@given(st.lists(STEPS, max_size=60))
def test_counts_what_runs_through_every_change_of_the_configuration(
    steps: list[tuple[str, Any]],
) -> None:
    limits = TenantLimits({}, 0)
    allowed: dict[str, int] = {}
    running: list[tuple[str, Lease]] = []
    for step, value in steps:
        if step == "configure":
            allowed = value
            settings = {name: TenantSettings(max_concurrent=most) for name, most in value.items()}
            limits.configure(settings, 0)
        elif step == "leave" and running:
            _, lease = running.pop(value % len(running))
            with lease:
                pass
        elif step == "enter" and value in allowed:
            count = sum(name == value for name, _ in running)
            full = bool(allowed[value]) and count >= allowed[value]
            try:
                running.append((value, limits.enter(value, 0)))
            except Overloaded:
                assert full
            else:
                assert not full
        limits.check_integrity()
        for name in "abc":
            assert limits.running(name) == sum(each == name for each, _ in running)
        known = {*allowed, ANYBODY.name} | {name for name, _ in running}
        assert limits.num_accounts == len(known)
    for _, lease in running:
        with lease:
            pass

    assert limits.num_running == 0
    assert limits.num_accounts == len(allowed) + 1


def test_a_lease_is_given_back_whatever_happens_and_once() -> None:
    limits = make_limits(max_concurrent=1)
    lease = limits.enter("acme", 0)
    assert limits.running("acme") == 1
    with contextlib.suppress(RuntimeError), lease:
        raise RuntimeError
    with lease:
        assert limits.running("acme") == 0

    assert limits.running("acme") == 0
    limits.check_integrity()


def test_one_more_than_may_run_is_refused_and_takes_nothing_out_of_the_bucket() -> None:
    limits = make_limits(max_concurrent=1, requests_per_s=1.0, burst_requests=2)
    with limits.enter("acme", 0):
        for _ in range(5):
            refusal = refused(limits)
    assert refusal.reason == "TOO_MANY_CONCURRENT"
    assert refusal.retry_delay_s == CONCURRENT_RETRY_S
    assert "tenants.acme.max_concurrent is 1" in refusal.message

    limits.enter("acme", 0)


def test_says_which_setting_refuses_and_when_there_is_room() -> None:
    limits = make_limits(requests_per_s=0.5, burst_requests=1)
    with limits.enter("acme", 10):
        refusal = refused(limits, 10.5)

    assert refusal.reason == "RATE_LIMITED"
    assert refusal.retry_delay_s == 1.5
    assert "tenants.acme.requests_per_s is 0.5, burst_requests 1" in refusal.message


def test_a_lower_bound_holds_at_once_and_breaks_nothing_that_runs() -> None:
    limits = make_limits(max_concurrent=3)
    running = [limits.enter("acme", 0) for _ in range(3)]
    limits.configure({"acme": TenantSettings(max_concurrent=1)}, 0)

    assert limits.running("acme") == 3
    for lease in running:
        refused(limits)
        with lease:
            pass
    limits.enter("acme", 0)


def test_a_tenant_that_comes_back_still_has_what_it_had_running() -> None:
    limits = make_limits(max_concurrent=1)
    lease = limits.enter("acme", 0)
    limits.configure({}, 0)
    limits.configure({"acme": TenantSettings(max_concurrent=1)}, 0)
    refused(limits)
    with lease:
        pass

    limits.enter("acme", 0)
    limits.check_integrity()


def test_a_new_rate_holds_from_now_on() -> None:
    limits = make_limits(requests_per_s=1.0, burst_requests=4)
    for _ in range(4):
        limits.enter("acme", 0)
    # Two seconds at the old rate, then at the new one.
    limits.configure({"acme": TenantSettings(requests_per_s=4.0, burst_requests=4)}, 2)
    for _ in range(2):
        limits.enter("acme", 2)

    assert refused(limits, 2).retry_delay_s == 0.25
    limits.configure({"acme": TenantSettings()}, 2)
    for _ in range(100):
        limits.enter("acme", 2)
    limits.configure({"acme": TenantSettings(requests_per_s=1.0, burst_requests=1)}, 2)
    limits.enter("acme", 2)
    refused(limits, 2)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    limits = make_limits(requests_per_s=1.0, burst_requests=1)
    limits.enter("acme", 10)
    for now_s in (9, 10, 5, 10.5):
        refused(limits, now_s)

    limits.enter("acme", 11)


def test_anybody_is_unlimited_and_counted() -> None:
    limits = make_limits(max_concurrent=1)
    leases = [limits.enter(ANYBODY.name, 0) for _ in range(1000)]

    assert limits.running(ANYBODY.name) == limits.num_running == 1000
    random.Random(1).shuffle(leases)
    for lease in leases:
        with lease:
            pass
    assert limits.num_running == 0


def test_a_lease_that_is_moved_is_held_by_the_other_alone() -> None:
    limits = make_limits(max_concurrent=1)
    with limits.enter("acme", 0.0) as lease:
        moved = lease.move()
    assert limits.running("acme") == 1
    with moved:
        assert admits(limits, 0.0) is None
    assert limits.running("acme") == 0


def test_what_is_refunded_was_never_taken() -> None:
    limits = make_limits(requests_per_s=0.125, burst_requests=1)
    for _ in range(3):
        with limits.enter("acme", 0.0) as lease:
            lease.refund()
        limits.check_integrity()
    assert admits(limits, 0.0)
    assert admits(limits, 0.0) is None

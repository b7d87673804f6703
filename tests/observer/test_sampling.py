from __future__ import annotations

import random
from typing import Any

from services.observer.sampling import MAX_CLASSES, NUM_NEEDED, TailRule
from tests.observer.made import a_hop, a_request


def request(ttft_s: float | None = 0.1, *, sampled: bool = False, **changes: Any) -> Any:
    return a_request(ttft_s=ttft_s, hops=(a_hop(sampled=sampled),), **changes)


def test_what_the_head_chose_is_kept_and_else_nothing_ordinary() -> None:
    rule = TailRule(slow_ttft_s=0.0)

    assert rule.keep(request(sampled=True))
    assert not rule.keep(request())


def test_failed_requests_are_kept() -> None:
    rule = TailRule(slow_ttft_s=0.0)

    assert rule.keep(request(error="no worker"))
    assert rule.keep(request(None, error="no worker"))


def test_requests_slower_than_the_setting_are_kept() -> None:
    rule = TailRule(slow_ttft_s=0.5)

    assert rule.keep(request(0.5))
    assert not rule.keep(request(0.49))
    assert not rule.keep(request(None))


def test_about_the_slowest_twentieth_of_each_class_is_kept() -> None:
    rule, shuffled = TailRule(slow_ttft_s=0.0), random.Random(5)
    for request_class, scale in (("interactive", 1.0), ("batch", 100.0)):
        for _ in range(NUM_NEEDED):
            assert not rule.keep(request(scale * shuffled.random(), request_class=request_class))
    kept = {
        request_class: sum(
            rule.keep(request(scale * shuffled.random(), request_class=request_class))
            for _ in range(2000)
        )
        for request_class, scale in (("interactive", 1.0), ("batch", 100.0))
    }
    assert all(60 < count < 160 for count in kept.values()), kept


def test_a_sampled_request_is_compared_with_as_well() -> None:
    rule = TailRule(slow_ttft_s=0.0)
    for _ in range(NUM_NEEDED):
        rule.keep(request(0.1, sampled=True))

    assert rule.keep(request(0.2))


def test_classes_are_bounded() -> None:
    rule = TailRule(slow_ttft_s=0.0)
    for number in range(1000):
        rule.keep(request(request_class=str(number)))

    assert len(rule._classes) == MAX_CLASSES

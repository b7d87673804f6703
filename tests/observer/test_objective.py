from __future__ import annotations

import pytest

from services.core.attributes import ERROR_TYPE
from services.observer.objective import Outcome, outcome_of
from tests.observer.made import a_failure, a_hop, a_request

SLO_S = 0.5


@pytest.mark.parametrize(
    ("ttft_s", "outcome"), [(0.5, Outcome.GOOD), (0.501, Outcome.SLOW), (0.0, Outcome.GOOD)]
)
def test_a_first_token_is_in_time_or_late(ttft_s: float, outcome: Outcome) -> None:
    assert outcome_of(a_request(ttft_s=ttft_s), SLO_S) is outcome


@pytest.mark.parametrize("code", ["NO_WORKER", "QUEUE_FULL", "router_unavailable", "_OTHER"])
def test_what_the_mesh_could_not_do_has_failed(code: str) -> None:
    assert outcome_of(a_failure(code), SLO_S) is Outcome.FAILED


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "RATE_LIMITED", "context_length_exceeded", "PLAN_EXPIRED"]
)
def test_what_callers_get_wrong_says_nothing_of_the_mesh(code: str) -> None:
    assert outcome_of(a_failure(code), SLO_S) is None


def test_the_word_of_any_hop_counts() -> None:
    hops = (
        a_hop(error="refused", attributes={ERROR_TYPE: "some_word_of_a_gateway"}),
        a_hop(error="refused", attributes={ERROR_TYPE: "PROMPT_TOO_LONG"}),
    )
    assert outcome_of(a_request(hops=hops, ttft_s=None, error="refused"), SLO_S) is None


@pytest.mark.parametrize("code", ["CANCELLED", "client_gone"])
def test_who_leaves_late_leaves_since_it_was_late(code: str) -> None:
    assert outcome_of(a_failure(code, duration_s=0.4), SLO_S) is None
    assert outcome_of(a_failure(code, duration_s=0.6), SLO_S) is Outcome.SLOW

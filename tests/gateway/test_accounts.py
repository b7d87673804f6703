from __future__ import annotations

from firsttoken.common.v1 import common_pb2
from services.core.ledger import Ledger, Segment
from services.gateway.accounts import add_usage, ledger_json, server_timing


def usage(prompt: int, cached: int, completion: int) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion
    )


def test_a_prompt_counts_once_and_answers_add_up() -> None:
    answers = [usage(10, 0, 3), usage(10, 8, 4), usage(20, 16, 5), usage(20, 19, 6)]

    total = add_usage(answers, num_choices=2)

    assert total == (30, 16, 18)
    assert total.to_json() == {
        "prompt_tokens": 30,
        "completion_tokens": 18,
        "total_tokens": 48,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_a_ledger_is_told_with_what_nobody_owns() -> None:
    ledger = Ledger(1.0)
    ledger.record(Segment.PREPROCESS, 1.0, 1.002)
    ledger.spend(Segment.PREFILL, 0.003)
    ledger.mark_first_token(1.010)

    told = ledger_json(ledger)

    assert (told["preprocess_ms"], told["prefill_ms"], told["queue_ms"]) == (2.0, 3.0, 0.0)
    assert (told["total_ms"], told["residual_ms"]) == (10.0, 5.0)
    assert "preprocess;dur=2.0" in server_timing(ledger)
    assert server_timing(ledger).endswith("residual;dur=5.0, ttft;dur=10.0")

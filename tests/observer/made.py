"""Requests made up for tests."""

from __future__ import annotations

from typing import Any

from services.core.attributes import ERROR_TYPE
from services.core.ledger import Segment
from services.observer.model import Hop, Request

SPENT_S = {
    Segment.QUEUE: 0.010,
    Segment.PREPROCESS: 0.002,
    Segment.ROUTE: 0.0002,
    Segment.PREFILL_QUEUE: 0.004,
    Segment.PREFILL: 0.050,
    Segment.TRANSFER: 0.0008,
}


def a_hop(**changes: Any) -> Hop:
    fields: dict[str, Any] = {
        "name": "router.generate",
        "service": "router",
        "member_id": "router-1",
        "host": "host-1",
        "trace_id": "0" * 31 + "1",
        "span_id": "0" * 15 + "1",
        "parent_span_id": "",
        "tracestate": "",
        "sampled": True,
        "arrived_unix_s": 1_800_000_000.0,
        "ended_s": 0.5,
        "first_token_s": 0.068,
        "parts": (),
        "spent_s": SPENT_S,
        "hidden_s": {},
        "error": "",
        "attributes": {},
    }
    return Hop(**{**fields, **changes})


def a_request(**changes: Any) -> Request:
    """One of 100 prompt tokens, 64 of them cached, and 10 of answer: 1 ms is nobody's."""
    fields: dict[str, Any] = {
        "trace_id": "0" * 31 + "1",
        "hops": (a_hop(),),
        "arrived_unix_s": 1_800_000_000.0,
        "ttft_s": 0.068,
        "duration_s": 0.5,
        "spent_s": SPENT_S,
        "residual_s": 0.001,
        "hidden_s": {},
        "handoff_s": 0.0,
        "tpot_s": 0.048,
        "model": "model-1",
        "tenant": "ada",
        "request_class": "interactive",
        "generation": 3,
        "worker_id": "worker-1",
        "engine": "simulated",
        "strategy": "kv_aware",
        "prompt_tokens": 100,
        "output_tokens": 10,
        "cached_tokens": 64,
        "predicted_tokens": 64,
        "best_elsewhere_tokens": 0,
        "loaded_blocks": 0,
        "expected_load_s": 0.0,
        "expected_compute_s": 0.0,
        "load_s": 0.0,
        "handed_off": False,
        "queue_position": 2,
        "batch_size": 4,
        "attempts": 1,
        "migrations": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "error": "",
    }
    return Request(**{**fields, **changes})


def a_failure(error_type: str, **changes: Any) -> Request:
    """One that came to no token."""
    hop = a_hop(error="it failed", attributes={ERROR_TYPE: error_type}, first_token_s=None)
    nothing: dict[str, Any] = {"ttft_s": None, "tpot_s": None, "spent_s": {}, "residual_s": 0.0}
    return a_request(hops=(hop,), error="it failed", **nothing, **changes)

"""Windows as the page meets them: requests through gateway, router, tokenizer and worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from firsttoken.observer.v1 import observer_pb2
from services.core import attributes as names
from services.core.ledger import Interval, Ledger, Segment
from services.observer.books import Books
from services.observer.hearing import Teller
from services.observer.model import (
    BubbleSum,
    Generation,
    Hop,
    Member,
    Part,
    Reading,
    Request,
    Window,
)
from services.runtime.hops import Told, encode
from services.runtime.telemetry import TraceContext

NOW_UNIX_S = 1_800_000_000.0
WORKERS = ("worker-1", "worker-2", "worker-3")


def trace_id(index: int) -> str:
    return hashlib.md5(str(index).encode(), usedforsecurity=False).hexdigest()


def scene(
    num_requests: int,
    *,
    over_s: float = 4200.0,
    slow_since_s: float | None = None,
    seed: int = 1,
    end_unix_s: float = NOW_UNIX_S,
    **changes: Any,
) -> Window:
    """Evenly spread over the time up to its end; in its last `slow_since_s` prompts miss."""
    rng = random.Random(seed)
    requests = []
    for index in range(num_requests):
        ago_s = over_s * (1 - (index + 0.5) / num_requests)
        misses = slow_since_s is not None and ago_s < slow_since_s
        requests.append(request(index, end_unix_s - ago_s, rng, misses=misses))
    fields: dict[str, Any] = {
        "begin_unix_s": end_unix_s - over_s,
        "end_unix_s": end_unix_s,
        "requests": tuple(requests),
        "readings": tuple(readings(end_unix_s)),
        "bubbles": tuple(bubbles(rng, end_unix_s)),
        "members": members(),
        "generations": (
            Generation(1, end_unix_s - 7200, {}),
            Generation(
                2, end_unix_s - 260, {"router.routing_strategy": ("kv_aware", "round_robin")}
            ),
        ),
    }
    return Window(**{**fields, **changes})


def request(
    index: int,
    arrived_unix_s: float,
    rng: random.Random,
    *,
    misses: bool = False,
    **changes: Any,
) -> Request:
    prompt_tokens = rng.randrange(400, 4000)
    cached_tokens = int(prompt_tokens * (0.1 if misses else rng.uniform(0.6, 0.95))) // 64 * 64
    spent_s = {
        Segment.QUEUE: rng.expovariate(1 / (0.05 if misses else 0.002)),
        Segment.PREPROCESS: rng.uniform(0.001, 0.004),
        Segment.ROUTE: rng.uniform(0.0001, 0.0004),
        Segment.PREFILL_QUEUE: rng.expovariate(1 / (0.03 if misses else 0.004)),
        Segment.KV_LOAD: rng.uniform(0.0, 0.01),
        Segment.PREFILL: (prompt_tokens - cached_tokens) / 9000,
        Segment.TRANSFER: rng.uniform(0.001, 0.004),
    }
    residual_s = rng.uniform(0.0001, 0.0009)
    ttft_s = sum(spent_s.values()) + residual_s
    fields: dict[str, Any] = {
        "trace_id": trace_id(index),
        "hops": hops(index, arrived_unix_s, spent_s, residual_s),
        "arrived_unix_s": arrived_unix_s,
        "ttft_s": ttft_s,
        "duration_s": ttft_s + 0.4,
        "spent_s": spent_s,
        "residual_s": residual_s,
        "hidden_s": {"write-behind": 0.02} if index % 3 == 0 else {},
        "handoff_s": 0.0,
        "tpot_s": 0.021,
        "model": "smollm2-135m-instruct",
        "tenant": ("acme", "globex", "")[index % 3],
        "request_class": "batch" if index % 5 == 0 else "interactive",
        "generation": 2 if misses else 1,
        "worker_id": WORKERS[index % 3],
        "engine": "llamacpp",
        "strategy": "round_robin" if misses else "kv_aware",
        "prompt_tokens": prompt_tokens,
        "output_tokens": 20,
        "cached_tokens": cached_tokens,
        "predicted_tokens": cached_tokens + (64 if index % 4 == 0 else 0),
        "best_elsewhere_tokens": int(prompt_tokens * 0.8) if misses else 0,
        "loaded_blocks": 1 if index % 6 == 0 else 0,
        "expected_load_s": 0.01,
        "expected_compute_s": 0.03,
        "load_s": 0.01,
        "handed_off": False,
        "queue_position": index % 7,
        "batch_size": 1 + index % 8,
        "attempts": 1,
        "migrations": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "error": "",
    }
    return Request(**{**fields, **changes})


def hops(
    index: int, arrived_unix_s: float, spent_s: Mapping[Segment, float], residual_s: float
) -> tuple[Hop, ...]:
    """Each measured what is its own; between them lies half of the transfer, there and back."""
    wire_s = spent_s[Segment.TRANSFER] / 2
    queued_s = wire_s + spent_s[Segment.PREPROCESS]
    routed_s = queued_s + spent_s[Segment.QUEUE]
    called_s = routed_s + spent_s[Segment.ROUTE]
    waited_s = spent_s[Segment.PREFILL_QUEUE]
    loaded_s = waited_s + spent_s[Segment.KV_LOAD]
    computed_s = loaded_s + spent_s[Segment.PREFILL]
    first_s = called_s + wire_s + computed_s

    def hop(name: str, number: int, parent: int, first_token_s: float | None, **more: Any) -> Hop:
        service = name.partition(".")[0]
        fields: dict[str, Any] = {
            "name": name,
            "service": service,
            "member_id": WORKERS[index % 3] if service == "worker" else f"{service}-1",
            "host": "host-1",
            "trace_id": trace_id(index),
            "span_id": f"{index:012x}{number:04x}",
            "parent_span_id": f"{index:012x}{parent:04x}" if parent else "",
            "tracestate": "",
            "sampled": True,
            "arrived_unix_s": arrived_unix_s + number / 1e6,
            "ended_s": (first_token_s or 0.0) + 0.4,
            "first_token_s": first_token_s,
            "parts": (),
            "spent_s": spent_s,
            "hidden_s": {},
            "error": "",
            "attributes": {"firsttoken.generation": 2, "gen_ai.request.model": "smollm2"},
        }
        return Hop(**{**fields, **more})

    return (
        hop("gateway.request", 1, 0, first_s + residual_s),
        hop(
            "router.generate",
            2,
            1,
            first_s,
            parts=(
                Part(Segment.QUEUE, queued_s, routed_s),
                Part(Segment.ROUTE, routed_s, called_s),
            ),
        ),
        hop(
            "tokenizer.encode",
            3,
            2,
            None,
            ended_s=spent_s[Segment.PREPROCESS],
            parts=(Part(Segment.PREPROCESS, 0.0, spent_s[Segment.PREPROCESS]),),
        ),
        hop(
            "worker.generate",
            4,
            2,
            computed_s,
            parts=(
                Part(Segment.PREFILL_QUEUE, 0.0, waited_s),
                Part(Segment.KV_LOAD, waited_s, loaded_s),
                Part(Segment.PREFILL, loaded_s, computed_s),
            ),
            hidden_s={"write-behind": 0.02} if index % 3 == 0 else {},
        ),
    )


def members() -> tuple[Member, ...]:
    def member(name: str, state: str = "ready", generation: int = 2, detail: str = "") -> Member:
        role = name.partition("-")[0]
        return Member(name, role, state, "127.0.0.1:7100", "host-1", generation, detail)

    return (
        member("gateway-1"),
        member("router-1"),
        member("tokenizer-1"),
        member("kvstore-1"),
        *(member(name) for name in WORKERS[:2]),
        member("worker-3", "draining", 1, "asked to leave"),
    )


def readings(end_unix_s: float) -> Sequence[Reading]:
    found = []
    for ago_s in (50.0, 0.0):
        unix_s = end_unix_s - ago_s
        for at, worker_id in enumerate(WORKERS):
            values = {
                ("firsttoken.worker.engine.busy", ()): 100 - ago_s * (0.2 + at / 4),
                ("firsttoken.worker.requests", (("state", "running"),)): 3.0 + at,
                ("firsttoken.worker.requests", (("state", "waiting"),)): 1.0,
                ("firsttoken.worker.kv.cached", ()): 300.0,
                ("firsttoken.worker.kv.reserved", ()): 60.0,
                ("firsttoken.worker.kv.capacity", ()): 512.0,
                ("firsttoken.process.loop.lag", (("quantile", "0.99"),)): 0.0012,
                ("firsttoken.worker.prompt.tokens", (("source", "worker"),)): 4e5 - ago_s * 4000,
                ("firsttoken.worker.prompt.tokens", (("source", "l1"),)): 9e4 - ago_s * 600,
                ("firsttoken.worker.prompt.tokens", (("source", "l2"),)): 2e4 - ago_s * 150,
                ("firsttoken.worker.prompt.tokens", (("source", "computed"),)): 3e5 - ago_s * 2500,
            }
            found += [
                Reading(unix_s, worker_id, "worker", name, labels, value)
                for (name, labels), value in values.items()
            ]
        name, labels = "firsttoken.router.requests.waiting", (("request_class", "batch"),)
        found.append(Reading(unix_s, "router-1", "router", name, labels, 2.0))
    return found


def bubbles(rng: random.Random, end_unix_s: float) -> list[BubbleSum]:
    stages = {"queue": 0.04, "kv_load": 0.02, "transfer": 0.004}
    return [
        BubbleSum(end_unix_s - rng.uniform(0, 280), WORKERS[at % 3], stage, rng.expovariate(1 / s))
        for at in range(60)
        for stage, s in stages.items()
    ]


def tell(books: Books, window: Window, *, tenant: str) -> None:
    """Has an observer hear of the window's requests, all of them this tenant's."""
    for service in ("gateway", "router", "tokenizer", "worker"):
        told = [
            as_told(hop, {**hop.attributes, **attributes(request, tenant)})
            for request in window.requests
            for hop in request.hops
            if hop.service == service
        ]
        message = observer_pb2.ReportRequest(hops_json=[encode(told, 0)])
        books.hear(Teller(f"{service}-1", service, "host-1", 1), message)
    books.close()


def as_told(hop: Hop, attributes: Mapping[str, Any]) -> Told:
    """By a process whose monotonic clock is the wall clock."""
    arrived_s = hop.arrived_unix_s
    ledger = Ledger(arrived_s)
    for segment, start_s, end_s in hop.parts:
        ledger.intervals.append(Interval(segment, arrived_s + start_s, arrived_s + end_s))
    for segment, spent_s in hop.spent_s.items():
        ledger.spend(segment, spent_s)
    for name, hidden_s in hop.hidden_s.items():
        ledger.hide(name, hidden_s)
    if hop.first_token_s is not None:
        ledger.mark_first_token(arrived_s + hop.first_token_s)
    context = TraceContext(hop.trace_id, hop.span_id, hop.sampled, hop.tracestate)
    ended_s = arrived_s + hop.ended_s
    return Told(hop.name, context, hop.parent_span_id, ledger, attributes, hop.error, ended_s)


def attributes(request: Request, tenant: str) -> dict[str, Any]:
    return {
        names.MODEL: request.model,
        names.TENANT: tenant,
        names.REQUEST_CLASS: request.request_class,
        names.WORKER_ID: request.worker_id,
        names.INPUT_TOKENS: request.prompt_tokens,
        names.CACHED_TOKENS: request.cached_tokens,
        names.OUTPUT_TOKENS: request.output_tokens,
        names.PREDICTED_TOKENS: request.predicted_tokens,
    }


FINDING = {
    "cause": "long_prefill_from_misses",
    "severity": "critical",
    "summary": "Prompts miss caches that other workers have: 71 % of the time to the first token"
    " is spent computing what is known elsewhere.",
    "explains_ms": 210.0,
    "share": 0.71,
    "evidence": [
        {"name": "hit rate", "value": "0.12", "threshold": "below 0.5"},
        {"name": "best elsewhere", "value": "0.80 of the prompts", "threshold": "above 0.3"},
    ],
    "trace_ids": [trace_id(2999), trace_id(2990)],
    "setting": "router.routing_strategy",
    "before": "round_robin",
    "after": "kv_aware",
    "expected": "P50 of the time to the first token from 310 to about 60 ms.",
}

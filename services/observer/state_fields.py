"""What `/api/state` answers, field by field.

Durations are seconds, times of day seconds since 1970, shares lie between 0 and 1. Of names and
messages that others chose, the beginning is given. There is no prompt text in it.
"""

from __future__ import annotations

from typing import TypedDict


class State(TypedDict):
    # Until when all this holds, and since when requests are kept.
    now_unix_s: float
    begin_unix_s: float
    # The newest configuration.
    generation: int
    headline: Headline
    # Kept, failed among them, and hops that processes could not tell.
    num_requests: int
    num_failed: int
    num_dropped: int
    # null: none came yet.
    last_request_unix_s: float | None
    # What a first token's time goes for, in the order to show.
    shares: list[str]
    # The last five minutes, and five minutes an hour before them, or as long before as is known.
    # null: no request came then, or it is not that long yet.
    now: Figures | None
    before: Figures | None
    # "5 minutes", "hour".
    timelines: list[Timeline]
    # The slowest of the last five minutes, the slowest first; then the last that failed without
    # a first token.
    slow: list[SlowRequest]
    cache: Cache
    bubbles: Bubbles
    queues: list[Queue]
    # Those that are not ready first. What is left out is counted.
    members: list[MemberRow]
    num_members_left_out: int
    # The doctor's, in its order.
    findings: list[FindingRow]
    # The oldest first.
    generations: list[GenerationRow]


class Headline(TypedDict):
    # "idle" (too few requests to judge), "healthy", "warning" or "critical".
    level: str
    # The first finding; without one, what the figures say. A sentence or two.
    text: str


class Figures(TypedDict):
    begin_unix_s: float
    end_unix_s: float
    num_requests: int
    num_failed: int
    # null where no first token came.
    p50_s: float | None
    p95_s: float | None
    # By share, on average: of all, and of the slowest twentieth.
    mean_s: dict[str, float] | None
    slowest_s: dict[str, float] | None
    # Of the prompts' tokens.
    hit_rate: float | None


class Timeline(TypedDict):
    """Columns with a value for each step."""

    name: str
    begin_unix_s: float
    step_s: int
    num_requests: list[int]
    num_failed: list[int]
    p50_s: list[float | None]
    p95_s: list[float | None]
    # By share.
    mean_s: dict[str, list[float | None]]
    slowest_s: dict[str, list[float | None]]
    hit_rate: list[float | None]


class RequestRow(TypedDict):
    trace_id: str
    # Its outermost hop: a trace may have several requests.
    span_id: str
    arrived_unix_s: float
    ttft_s: float | None
    duration_s: float
    # By share, the residual included; their sum is the time to the first token.
    spent_s: dict[str, float]
    # Work beside the critical path, by name.
    hidden_s: dict[str, float]
    handoff_s: float
    model: str
    tenant: str
    request_class: str
    generation: int
    worker_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    # "": it went well.
    error: str


class SlowRequest(RequestRow):
    hops: list[HopRow]


class HopRow(TypedDict):
    name: str
    service: str
    member_id: str
    # Where it lies on the outermost hop's axis, and how many hops are above it.
    offset_s: float
    depth: int
    # From `offset_s` on.
    ended_s: float
    first_token_s: float | None
    # Segment, start and end, from `offset_s` on.
    parts: list[tuple[str, float, float]]
    hidden_s: dict[str, float]
    error: str


class Cache(TypedDict):
    """Of the last five minutes."""

    prompt_tokens: int
    # Where they came from: "worker", "node memory", "Redis", "computed"; where workers do not
    # count, "a cache", "computed".
    tiers: list[TierRow]
    predicted: Predicted
    # Of blocks that KV stores were asked for, by tier.
    stores: list[StoreRow]


class TierRow(TypedDict):
    tier: str
    tokens: int
    share: float


class Predicted(TypedDict):
    """What routers expected to be cached, of the requests of which they expected something."""

    num_requests: int
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    # Expected and not found; found and not expected.
    over_tokens: int
    under_tokens: int


class StoreRow(TypedDict):
    tier: str
    num_hits: int
    num_misses: int
    hit_rate: float | None


class Bubbles(TypedDict):
    """Engines that had nothing to do while work for them was somewhere, in the last minutes."""

    # Workers' time together.
    engine_s: float
    stages: list[StageRow]


class StageRow(TypedDict):
    # That held the work.
    stage: str
    duration_s: float
    # Of the workers' time.
    share: float


class Queue(TypedDict):
    """Of the last five minutes, by class."""

    request_class: str
    num_requests: int
    num_failed: int
    # Now; null where no router says. And the most that a request met before it.
    num_waiting: int | None
    longest: int
    p50_s: float | None
    p95_s: float | None


class MemberRow(TypedDict):
    id: str
    role: str
    # "starting", "ready", "draining".
    state: str
    address: str
    host: str
    generation: int
    detail: str
    # Name and value, as its newest readings say; what is there depends on the role.
    load: list[LoadRow]


class LoadRow(TypedDict):
    name: str
    # "request", "share", "second" or "byte".
    unit: str
    value: float


class FindingRow(TypedDict):
    cause: str
    severity: str
    summary: str
    evidence: list[EvidenceRow]
    # Requests that show it.
    trace_ids: list[str]
    # "": there is none to change.
    setting: str
    before: str
    after: str
    # What the change is expected to bring, or that there is not enough evidence.
    expected: str


class EvidenceRow(TypedDict):
    name: str
    value: str
    # "": none.
    threshold: str


class GenerationRow(TypedDict):
    number: int
    since_unix_s: float
    # Key, before, after.
    changes: list[tuple[str, str, str]]

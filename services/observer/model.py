"""What the observer knows, as values: requests, where their time went, and the mesh around them.

Pure. Durations are seconds, each measured by one process on its own clock; times of day are for
people, and nothing is computed with them across processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.core.ledger import Segment


class Part(NamedTuple):
    """An interval that one process measured, from the request's arrival there on."""

    segment: Segment
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One request in one process."""

    # "gateway.request", "router.generate", "router.plan", "tokenizer.encode",
    # "worker.generate", "worker.prefill".
    name: str
    service: str
    member_id: str
    host: str
    # Hexadecimal; `parent_span_id` empty: the trace begins here.
    trace_id: str
    span_id: str
    parent_span_id: str
    tracestate: str
    sampled: bool
    arrived_unix_s: float
    # From the arrival on.
    ended_s: float
    first_token_s: float | None
    parts: tuple[Part, ...]
    # The ledger's sums, with those of the hops below.
    spent_s: Mapping[Segment, float]
    # Work beside the critical path.
    hidden_s: Mapping[str, float]
    error: str
    # Those of the span.
    attributes: Mapping[str, Any]

    @property
    def residual_s(self) -> float:
        """Of the time to the first token, what no segment owns; 0 without one."""
        if self.first_token_s is None:
            return 0.0
        return self.first_token_s - sum(self.spent_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request with all its hops. The outermost hop's ledger is the request's."""

    trace_id: str
    # Those that came, the outermost first.
    hops: tuple[Hop, ...]
    arrived_unix_s: float
    # As the outermost hop saw it; None: it never came.
    ttft_s: float | None
    duration_s: float
    spent_s: Mapping[Segment, float]
    residual_s: float
    hidden_s: Mapping[str, float]
    # Between the first token and the second, of which a hand-off of KV is part.
    handoff_s: float
    # Between two tokens; None for an answer of one.
    tpot_s: float | None
    model: str
    tenant: str
    request_class: str
    generation: int
    worker_id: str
    engine: str
    strategy: str
    prompt_tokens: int
    output_tokens: int
    # Found in a cache or loaded from a KV store, and as the router expected it.
    cached_tokens: int
    predicted_tokens: int | None
    # The most that another worker had, as the router knew at its choice.
    best_elsewhere_tokens: int
    loaded_blocks: int
    expected_load_s: float
    expected_compute_s: float
    load_s: float
    handed_off: bool
    # Requests before it in the router's queue when it came, and sequences in its first step.
    queue_position: int
    batch_size: int
    attempts: int
    migrations: int
    # Drafted and accepted tokens of speculation; 0: none.
    drafted_tokens: int
    accepted_tokens: int
    error: str


class Member(NamedTuple):
    """One process, as membership has it."""

    id: str
    # "router", "worker", ...
    role: str
    # "starting", "ready", "draining".
    state: str
    address: str
    host: str
    generation: int
    detail: str


class Reading(NamedTuple):
    """A metric of one process, at one time."""

    unix_s: float
    member_id: str
    service: str
    # As in OpenTelemetry.
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class BubbleSum(NamedTuple):
    """Engine time of one worker in which nothing ran while work was held by `stage`."""

    unix_s: float
    worker_id: str
    stage: str
    duration_s: float


class Generation(NamedTuple):
    """A configuration, from when on it held, and what it changed: key to (before, after)."""

    number: int
    since_unix_s: float
    changes: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is known of some minutes. What the page shows and the doctor judges."""

    begin_unix_s: float
    end_unix_s: float
    requests: tuple[Request, ...]
    readings: tuple[Reading, ...]
    bubbles: tuple[BubbleSum, ...]
    members: tuple[Member, ...]
    generations: tuple[Generation, ...]
    # Flattened: dotted key to value.
    config: Mapping[str, Any] = field(default_factory=dict)
    # Hops that processes could not tell.
    num_dropped: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_unix_s - self.begin_unix_s

"""What a process tells of one request, as JSON arrays: the least that telling can cost it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from services.core.ledger import Ledger
from services.runtime.status import MAX_MESSAGE_BYTES, clip
from services.runtime.telemetry import TraceContext


class Hop(NamedTuple):
    """One request in one process, in the order of its JSON array.

    There, its attributes are two fields: the place of their names, and a list of values.
    Durations are seconds on that process's monotonic clock, from the arrival on.
    """

    # "router.generate", "worker.generate", "worker.prefill", ...
    name: str
    # 32 and 16 hexadecimal digits; `parent_span_id` empty: the trace begins here.
    trace_id: str
    span_id: str
    parent_span_id: str
    tracestate: str
    # The head's decision; the observer may keep more.
    sampled: bool
    # By this process's wall clock, for people: nothing is computed with it.
    arrived_unix_ns: int
    ended_s: float
    # None: it never came.
    first_token_s: float | None
    # Segment, start and end of each interval measured here.
    parts: Sequence[tuple[str, float, float]]
    # The ledger's sums, those of the hops below included.
    spent_s: Sequence[tuple[str, float]]
    # Work beside the critical path.
    hidden_s: Sequence[tuple[str, float]]
    # Empty: it ended well.
    error: str
    attributes: Mapping[str, Any]


class Told(NamedTuple):
    """One request, as it was recorded."""

    name: str
    context: TraceContext
    parent_span_id: str
    ledger: Ledger
    attributes: Mapping[str, Any]
    error: str
    # On the monotonic clock.
    ended_s: float


def encode(told: Iterable[Told], wall_offset_ns: int) -> bytes:
    """`wall_offset_ns`: what the wall clock is ahead of the monotonic one.

    Names of attributes are there once for all hops that have the same: half of the bytes.
    Raises TypeError for what JSON cannot say.
    """
    places: dict[tuple[str, ...], int] = {}
    rows = [_row(each, wall_offset_ns, places) for each in told]
    return orjson.dumps((list(places), rows))


def decode(data: bytes) -> list[Hop]:
    """Raises ValueError, LookupError or TypeError; the types of fields are not checked."""
    names, rows = orjson.loads(data)
    return [
        Hop._make([*row, dict(zip(names[place], values, strict=True))])
        for *row, place, values in rows
    ]


def _row(told: Told, wall_offset_ns: int, places: dict[tuple[str, ...], int]) -> tuple[Any, ...]:
    """Plain tuples: orjson takes no others."""
    name, context, parent_span_id, ledger, attributes, error, ended_s = told
    trace_id, span_id, sampled, tracestate = context
    arrived_s, first_token_s = ledger.arrived_s, ledger.first_token_s
    return (
        name,
        trace_id,
        span_id,
        parent_span_id,
        tracestate,
        bool(sampled),
        wall_offset_ns + int(arrived_s * 1e9),
        ended_s - arrived_s,
        None if first_token_s is None else first_token_s - arrived_s,
        [(segment, start - arrived_s, end - arrived_s) for segment, start, end in ledger.intervals],
        list(ledger.sums_s()),
        list(ledger.hidden_s.items()),
        clip(error, MAX_MESSAGE_BYTES) if error else "",
        places.setdefault(tuple(attributes), len(places)),
        list(attributes.values()),
    )

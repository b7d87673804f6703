"""What the page shows: a window, the doctor's findings and the history as one JSON object.

Pure, and bounded whatever comes: below MAX_STATE_BYTES. `make_state` is `/api/state`; its fields
are in state_fields.py. `/api/requests` and `/api/requests/{trace_id}` are in rows.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from services.core.redis_url import without_password
from services.observer.history import SHARES, History, Series, Summary
from services.observer.model import Generation, Request, Window
from services.observer.rows import (
    describe,
    describe_hops,
    maybe_seconds,
    name,
    phrase,
    seconds,
    text,
)
from services.observer.state_cache import cache
from services.observer.state_fields import (
    EvidenceRow,
    Figures,
    FindingRow,
    GenerationRow,
    SlowRequest,
    State,
    Timeline,
)
from services.observer.state_headline import headline
from services.observer.state_mesh import MAX_MEMBERS, NOW_S, bubbles, members, queues

MAX_STATE_BYTES = 200_000
AN_HOUR_S = 3600.0
MAX_SLOW, MAX_FAILED = 8, 3
MAX_FINDINGS, MAX_EVIDENCE, MAX_TRACES = 8, 6, 5
MAX_GENERATIONS, MAX_CHANGES = 12, 4


def make_state(
    window: Window, findings: Sequence[Mapping[str, Any]], history: History | None = None
) -> State:
    """`findings` as `/api/doctor` has them. Without `history`, the window is all that is known."""
    now_unix_s = window.end_unix_s
    history = history or History.of(window.requests, now_unix_s)
    recent = [r for r in window.requests if r.arrived_unix_s > now_unix_s - NOW_S]
    now, before = _now_and_before(history, now_unix_s)
    rows = [_finding(finding) for finding in findings[:MAX_FINDINGS]]
    numbers = [generation.number for generation in window.generations]
    arrivals = [request.arrived_unix_s for request in window.requests]
    return State(
        now_unix_s=seconds(now_unix_s),
        begin_unix_s=seconds(window.begin_unix_s),
        generation=max([*numbers, *(member.generation for member in window.members)], default=0),
        headline=headline(window, rows, now, before),
        num_requests=len(window.requests),
        num_failed=sum(bool(request.error) for request in window.requests),
        num_dropped=window.num_dropped,
        last_request_unix_s=seconds(max(arrivals)) if arrivals else None,
        shares=list(SHARES),
        now=now,
        before=before,
        timelines=[
            _timeline("5 minutes", history.minutes, now_unix_s),
            _timeline("hour", history.hour, now_unix_s),
        ],
        slow=_slow(recent),
        cache=cache(recent, window, now_unix_s - NOW_S),
        bubbles=bubbles(window),
        queues=queues(recent, window),
        members=members(window),
        num_members_left_out=max(len(window.members) - MAX_MEMBERS, 0),
        findings=rows,
        generations=[_generation(each) for each in window.generations[-MAX_GENERATIONS:]],
    )


def _now_and_before(history: History, now_unix_s: float) -> tuple[Figures | None, Figures | None]:
    minutes, hour = history.minutes, history.hour
    begin_unix_s = now_unix_s - NOW_S
    now = _figures(minutes, begin_unix_s, now_unix_s + 1)
    oldest_unix_s = hour.oldest_unix_s(now_unix_s)
    if oldest_unix_s is None or oldest_unix_s > begin_unix_s - NOW_S:
        return now, None
    then_unix_s = max(begin_unix_s - AN_HOUR_S, oldest_unix_s)
    return now, _figures(hour, then_unix_s, then_unix_s + NOW_S)


def _figures(series: Series, begin_unix_s: float, end_unix_s: float) -> Figures | None:
    summary = series.between(begin_unix_s, end_unix_s).summary()
    if not summary.num_requests:
        return None
    return Figures(
        begin_unix_s=seconds(begin_unix_s),
        end_unix_s=seconds(end_unix_s),
        num_requests=summary.num_requests,
        num_failed=summary.num_failed,
        p50_s=maybe_seconds(summary.p50_s),
        p95_s=maybe_seconds(summary.p95_s),
        mean_s=_rounded(summary.mean_s),
        slowest_s=_rounded(summary.slowest_s),
        hit_rate=maybe_seconds(summary.hit_rate),
    )


def _rounded(values_s: Mapping[str, float] | None) -> dict[str, float] | None:
    if values_s is None:
        return None
    return {key: seconds(value) for key, value in values_s.items()}


def _timeline(title: str, series: Series, now_unix_s: float) -> Timeline:
    begins = series.begins_unix_s(now_unix_s)
    steps = [series.summary_at(begin) for begin in begins]
    return Timeline(
        name=title,
        begin_unix_s=begins[0],
        step_s=series.step_s,
        num_requests=[step.num_requests for step in steps],
        num_failed=[step.num_failed for step in steps],
        p50_s=[maybe_seconds(step.p50_s) for step in steps],
        p95_s=[maybe_seconds(step.p95_s) for step in steps],
        mean_s=_columns(steps, "mean_s"),
        slowest_s=_columns(steps, "slowest_s"),
        hit_rate=[maybe_seconds(step.hit_rate) for step in steps],
    )


def _columns(steps: Sequence[Summary], field: str) -> dict[str, list[float | None]]:
    rows = [getattr(step, field) for step in steps]
    return {
        share: [None if row is None else seconds(row[share]) for row in rows] for share in SHARES
    }


def _slow(recent: Sequence[Request]) -> list[SlowRequest]:
    slowest = heapq.nlargest(
        MAX_SLOW,
        (request for request in recent if request.ttft_s is not None),
        key=lambda request: request.ttft_s or 0.0,
    )
    failed = heapq.nlargest(
        MAX_FAILED,
        (request for request in recent if request.ttft_s is None and request.error),
        key=lambda request: request.arrived_unix_s,
    )
    return [SlowRequest(**describe(each), hops=describe_hops(each)) for each in (*slowest, *failed)]


def _finding(finding: Mapping[str, Any]) -> FindingRow:
    """Of services.observer.doctor.finding.Finding.plain()."""
    return FindingRow(
        cause=name(finding["cause"]),
        severity=name(finding["severity"]),
        summary=text(finding["summary"]),
        evidence=[
            EvidenceRow(
                name=phrase(each["name"]),
                value=phrase(each["value"]),
                threshold=phrase(each["threshold"]),
            )
            for each in finding["evidence"][:MAX_EVIDENCE]
        ],
        trace_ids=[name(trace_id) for trace_id in finding["trace_ids"][:MAX_TRACES]],
        setting=name(finding["setting"]),
        before=_setting(finding["setting"], finding["before"]),
        after=_setting(finding["setting"], finding["after"]),
        expected=text(finding["expected"]),
    )


def _generation(generation: Generation) -> GenerationRow:
    changes = list(generation.changes.items())[:MAX_CHANGES]
    return GenerationRow(
        number=generation.number,
        since_unix_s=seconds(generation.since_unix_s),
        changes=[
            (name(key), _setting(key, before), _setting(key, after))
            for key, (before, after) in changes
        ],
    )


def _setting(key: str, value: object) -> str:
    """As anyone may see it; "" for none."""
    if value is None:
        return ""
    if key.startswith("tenants"):
        return "(not shown)"
    return name(without_password(str(value)) if key.endswith("redis_url") else value)

"""The mesh around the requests, as the page shows it: members, queues, bubbles, caches. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from services.core.ledger import Segment
from services.observer.history import TAIL
from services.observer.model import Member, Request, Window
from services.observer.rows import name, phrase, seconds
from services.observer.state_fields import Bubbles, LoadRow, MemberRow, Queue, StageRow
from services.observer.state_load import RATE_S, Tracks, load_of, load_tracks

NOW_S = 300.0
_WAITING = "firsttoken.router.requests.waiting"
MAX_MEMBERS, MAX_QUEUES, MAX_STAGES = 60, 8, 12


def bubbles(window: Window) -> Bubbles:
    since_unix_s = max(window.end_unix_s - NOW_S, window.begin_unix_s)
    lost_s: dict[str, float] = defaultdict(float)
    for bubble in window.bubbles:
        if bubble.unix_s > since_unix_s:
            lost_s[bubble.stage] += bubble.duration_s
    num_workers = sum(member.role == "worker" for member in window.members)
    engine_s = num_workers * (window.end_unix_s - since_unix_s)
    longest = sorted(lost_s.items(), key=lambda item: item[1], reverse=True)[:MAX_STAGES]
    return Bubbles(
        engine_s=seconds(engine_s),
        stages=[
            StageRow(
                stage=name(stage),
                duration_s=seconds(duration_s),
                share=seconds(duration_s / engine_s) if engine_s else 0.0,
            )
            for stage, duration_s in longest
        ],
    )


def queues(recent: Iterable[Request], window: Window) -> list[Queue]:
    since_unix_s = window.end_unix_s - RATE_S
    tracks = Tracks(window.readings, (_WAITING,), since_unix_s=since_unix_s).of_all(_WAITING)
    waiting: dict[str, int] = defaultdict(int)
    for track in tracks:
        waiting[dict(track.last.labels).get("request_class", "")] += int(track.last.value)
    by_class: dict[str, list[Request]] = {request_class: [] for request_class in waiting}
    for request in recent:
        by_class.setdefault(request.request_class, []).append(request)
    largest = sorted(by_class.items(), key=lambda item: len(item[1]), reverse=True)[:MAX_QUEUES]
    return [_queue(each, requests, waiting.get(each)) for each, requests in largest]


def _queue(request_class: str, requests: Sequence[Request], num_waiting: int | None) -> Queue:
    answered = [request for request in requests if request.ttft_s is not None]
    waits_s = sorted(request.spent_s.get(Segment.QUEUE, 0.0) for request in answered)
    return Queue(
        request_class=name(request_class),
        num_requests=len(requests),
        num_failed=sum(bool(request.error) for request in requests),
        num_waiting=num_waiting,
        longest=max((request.queue_position for request in requests), default=0),
        p50_s=_quantile_s(waits_s, 0.5),
        p95_s=_quantile_s(waits_s, TAIL),
    )


def _quantile_s(ordered_s: Sequence[float], share: float) -> float | None:
    if not ordered_s:
        return None
    return seconds(ordered_s[max(math.ceil(share * len(ordered_s)) - 1, 0)])


def members(window: Window) -> list[MemberRow]:
    tracks = load_tracks(window.readings, window.end_unix_s)
    ordered = sorted(window.members, key=lambda m: (m.state == "ready", m.role, m.id))
    return [_member(member, load_of(tracks, member.id)) for member in ordered[:MAX_MEMBERS]]


def _member(member: Member, load: list[LoadRow]) -> MemberRow:
    return MemberRow(
        id=name(member.id),
        role=name(member.role),
        state=name(member.state),
        address=name(member.address),
        host=name(member.host),
        generation=member.generation,
        detail=phrase(member.detail),
        load=load,
    )

"""A request's hops on one axis of time, though no two clocks are compared.

Pure. A hop's place follows from durations alone: it lies within the hop that called it, in a
stretch in which that one measured nothing of its own, in the middle of it. What is left on both
sides is the way there and back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from services.observer.model import Hop, Part, Request

MAX_DEPTH = 8


class Placed(NamedTuple):
    hop: Hop
    # From the arrival at the outermost hop on.
    offset_s: float
    # How many hops are above it.
    depth: int


def place(request: Request) -> list[Placed]:
    """Every hop once, each below the one that called it; what has no caller comes last."""
    callees: dict[str, list[Hop]] = defaultdict(list)
    known = {hop.span_id for hop in request.hops}
    for hop in request.hops:
        callees[hop.parent_span_id if hop.parent_span_id in known else ""].append(hop)
    placed: list[Placed] = []
    seen: set[str] = set()

    def enter(hop: Hop, offset_s: float, depth: int) -> None:
        if hop.span_id in seen:
            return
        seen.add(hop.span_id)
        placed.append(Placed(hop, offset_s, depth))
        below = sorted(callees[hop.span_id], key=lambda callee: callee.arrived_unix_s)
        gaps = _gaps(hop)
        for callee in below:
            inner_s = _inner_offset_s(hop, callee, gaps)
            enter(callee, offset_s + inner_s, min(depth + 1, MAX_DEPTH))

    for root in callees[""]:
        enter(root, 0.0, 0)
    for hop in request.hops:  # callers in a ring
        enter(hop, 0.0, 0)
    return placed


def merged_parts(parts: Sequence[Part], max_parts: int) -> list[Part]:
    """In order of time, those of one segment that touch as one; of too many, the longest."""
    merged: list[Part] = []
    for part in sorted(parts, key=lambda part: part.start_s):
        if merged and merged[-1].segment is part.segment and part.start_s <= merged[-1].end_s:
            last = merged[-1]
            merged[-1] = last._replace(end_s=max(last.end_s, part.end_s))
        else:
            merged.append(part)
    if len(merged) > max_parts:
        longest = sorted(merged, key=lambda part: part.start_s - part.end_s)[:max_parts]
        merged = sorted(longest, key=lambda part: part.start_s)
    return merged


def _inner_offset_s(caller: Hop, callee: Hop, gaps: list[tuple[float, float]]) -> float:
    """When it arrived, from the caller's arrival on."""
    if caller.first_token_s is not None and callee.first_token_s is not None:
        # The last stretch before the caller had the first token: it brought it.
        length_s, end_s = callee.first_token_s, caller.first_token_s
        before = [(start, min(end, end_s)) for start, end in gaps if start < end_s]
        start_s = before[-1][0] if before and before[-1][1] >= end_s else 0.0
    else:
        length_s = callee.ended_s
        fitting = [(start, end) for start, end in gaps if end - start >= length_s]
        start_s, end_s = fitting[0] if fitting else (0.0, caller.ended_s)
    return max(end_s - length_s - max((end_s - start_s - length_s) / 2, 0.0), 0.0)


def _gaps(hop: Hop) -> list[tuple[float, float]]:
    """In which it measured nothing of its own."""
    gaps, reached_s = [], 0.0
    for part in sorted(hop.parts, key=lambda part: part.start_s):
        if part.start_s > reached_s:
            gaps.append((reached_s, part.start_s))
        reached_s = max(reached_s, part.end_s)
    if hop.ended_s > reached_s:
        gaps.append((reached_s, hop.ended_s))
    return gaps

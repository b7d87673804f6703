"""Hops on one axis, by durations alone."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ledger import Segment
from services.observer.model import Hop, Part
from services.observer.placing import Placed, merged_parts, place
from tests.observer.made import a_hop, a_request
from tests.observer.scenes import NOW_UNIX_S, request

PREFILL, QUEUE = Segment.PREFILL, Segment.QUEUE


def test_hops_lie_within_those_that_called_them() -> None:
    placed = {each.hop.name: each for each in place(request(7, NOW_UNIX_S, random.Random(7)))}
    gateway, router = placed["gateway.request"], placed["router.generate"]
    tokenizer, worker = placed["tokenizer.encode"], placed["worker.generate"]
    assert [gateway.depth, router.depth, tokenizer.depth, worker.depth] == [0, 1, 2, 2]
    queue, route = router.hop.parts
    assert tokenizer.offset_s + tokenizer.hop.ended_s <= router.offset_s + queue.start_s
    assert worker.offset_s >= router.offset_s + route.end_s
    assert first(worker) <= first(router) <= first(gateway)
    # Half of the way lies before it, half behind it.
    before_s = worker.offset_s - router.offset_s - route.end_s
    assert before_s == pytest.approx(first(router) - first(worker))


def test_clocks_play_no_part() -> None:
    made = request(7, NOW_UNIX_S, random.Random(7))
    hops = [
        dataclasses.replace(hop, arrived_unix_s=hop.arrived_unix_s + skew_s)
        for hop, skew_s in zip(made.hops, (0.0, 3600.0, 3600.0, 3600.1), strict=True)
    ]
    skewed = a_request(hops=tuple(hops))
    assert [each.offset_s for each in place(skewed)] == [each.offset_s for each in place(made)]


def test_a_ring_of_callers_ends() -> None:
    ring = tuple(
        a_hop(span_id=f"{at:016x}", parent_span_id=f"{(at + 1) % 3:016x}") for at in range(3)
    )
    assert {each.hop.span_id for each in place(a_request(hops=ring))} == {
        hop.span_id for hop in ring
    }


part = st.builds(
    lambda segment, start_s, length_s: Part(segment, start_s, start_s + length_s),
    st.sampled_from(Segment),
    st.floats(0, 2),
    st.floats(0, 2),
)
hop = st.builds(
    lambda number, parent, first_token_s, ended_s, parts: a_hop(
        span_id=f"{number:016x}",
        parent_span_id=f"{parent:016x}" if parent else "",
        first_token_s=first_token_s,
        ended_s=ended_s,
        parts=tuple(parts),
    ),
    st.integers(1, 8),
    st.integers(0, 8),
    st.none() | st.floats(0, 3),
    st.floats(0, 3),
    st.lists(part, max_size=5),
)


@given(st.lists(hop, min_size=1, max_size=8, unique_by=lambda each: each.span_id))
def test_every_hop_has_one_place(hops: list[Hop]) -> None:
    placed = place(a_request(hops=tuple(hops)))
    assert sorted(each.hop.span_id for each in placed) == sorted(each.span_id for each in hops)
    assert all(each.offset_s >= 0 and each.depth >= 0 for each in placed)


@given(st.lists(part, max_size=20), st.integers(1, 6))
def test_merging_keeps_what_was_measured(parts: list[Part], max_parts: int) -> None:
    merged = merged_parts(parts, max_parts)
    assert len(merged) <= max_parts
    assert [each.start_s for each in merged] == sorted(each.start_s for each in merged)
    longest_s = max((each.end_s - each.start_s for each in parts), default=0.0)
    assert max((each.end_s - each.start_s for each in merged), default=0.0) >= longest_s


def test_parts_that_touch_are_one() -> None:
    parts = [Part(PREFILL, 0.0, 1.0), Part(PREFILL, 1.0, 2.0), Part(QUEUE, 2.0, 3.0)]
    assert merged_parts(parts, 9) == [Part(PREFILL, 0.0, 2.0), Part(QUEUE, 2.0, 3.0)]


def first(placed: Placed) -> float:
    return placed.offset_s + (placed.hop.first_token_s or 0.0)

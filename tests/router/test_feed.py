from __future__ import annotations

import pytest

from router.feed import Feed, Verdict
from router.reports import Event, EvictedEvent, LoadEvent, Report, SnapshotEvent, StoredEvent

NEXT, OLD, GAP = Verdict.NEXT, Verdict.OLD, Verdict.GAP
SNAPSHOT, STORED, EVICTED = SnapshotEvent(()), StoredEvent((b"k",)), EvictedEvent((b"k",))


def judge(feed: Feed, sequence: int, event: Event, incarnation: str = "a") -> Verdict:
    return feed.judge(Report(sequence, incarnation, event))


@pytest.fixture
def feed() -> Feed:
    feed = Feed()
    assert judge(feed, 5, SNAPSHOT) is NEXT
    return feed


def test_events_count_up_from_the_snapshot(feed: Feed) -> None:
    assert judge(feed, 6, STORED) is NEXT
    assert judge(feed, 7, EVICTED) is NEXT
    assert judge(feed, 7, LoadEvent()) is NEXT
    assert judge(feed, 7, SNAPSHOT._replace(continues=True)) is NEXT


@pytest.mark.parametrize("event", [STORED, LoadEvent()])
def test_nothing_is_taken_before_a_snapshot(event: Event) -> None:
    assert judge(Feed(), 1, event) is GAP


@pytest.mark.parametrize(("sequence", "event"), [(7, STORED), (8, EVICTED), (6, LoadEvent())])
def test_a_missing_event_is_a_gap_until_the_next_snapshot(
    feed: Feed, sequence: int, event: Event
) -> None:
    assert judge(feed, sequence, event) is GAP
    assert not feed.is_live
    assert judge(feed, sequence + 1, STORED) is GAP
    assert judge(feed, sequence + 1, SNAPSHOT) is NEXT
    assert judge(feed, sequence + 2, STORED) is NEXT


def test_what_comes_twice_counts_once(feed: Feed) -> None:
    assert judge(feed, 6, STORED) is NEXT
    assert judge(feed, 6, STORED) is OLD
    assert judge(feed, 5, EVICTED) is OLD
    assert judge(feed, 5, LoadEvent()) is OLD
    assert judge(feed, 5, SNAPSHOT) is OLD
    assert judge(feed, 7, STORED) is NEXT


def test_another_incarnation_begins_with_a_snapshot(feed: Feed) -> None:
    assert judge(feed, 1, STORED, "b") is GAP
    assert judge(feed, 1, SNAPSHOT, "b") is NEXT
    assert judge(feed, 2, STORED, "b") is NEXT
    # One of the former, that comes late.
    assert judge(feed, 6, EVICTED, "a") is GAP


def test_a_feed_that_ended_needs_a_snapshot(feed: Feed) -> None:
    feed.end()

    assert judge(feed, 6, STORED) is GAP

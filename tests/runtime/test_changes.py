from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.changes import (
    MAX_BACKLOG,
    Follower,
    KeyFeed,
    KeysChange,
    KeysEvent,
    KeysSnapshot,
)


class Owner:
    """Keeps a set, and tells each change."""

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}
        self.feed = KeyFeed(self.keys.keys(), "incarnation")

    def change(self, *, add: tuple[bytes, ...] = (), remove: tuple[bytes, ...] = ()) -> None:
        for key in remove:
            del self.keys[key]
        self.keys.update(dict.fromkeys(add))
        self.feed.publish(added=add, removed=remove)


async def ready(follower: Follower) -> list[KeysEvent]:
    """All that it can be told now."""
    events: list[KeysEvent] = []
    while True:
        waiting = asyncio.ensure_future(follower.next())
        await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            return events
        event = waiting.result()
        assert event is not None
        events.append(event)


async def test_a_follower_begins_with_a_snapshot_and_then_hears_every_change() -> None:
    owner = Owner()
    owner.change(add=(b"a", b"b"))
    with owner.feed.follow() as follower:
        first = await ready(follower)
        owner.change(add=(b"c",), remove=(b"a",))
        then = await ready(follower)

    assert first == [KeysSnapshot(1, "incarnation", (b"a", b"b"))]
    assert then == [
        KeysChange(2, "incarnation", False, (b"a",)),
        KeysChange(3, "incarnation", True, (b"c",)),
    ]


async def test_all_followers_hear_the_same_numbers() -> None:
    owner = Owner()
    with owner.feed.follow() as early, owner.feed.follow() as late:
        await ready(early)
        await ready(late)
        for number in range(5):
            owner.change(add=(bytes([number]),))

        assert await ready(early) == await ready(late)
        assert owner.feed.num_followers == 2
    assert owner.feed.num_followers == 0


async def test_what_changes_nothing_is_not_told() -> None:
    owner = Owner()
    with owner.feed.follow() as follower:
        await ready(follower)
        owner.change()

        assert await ready(follower) == []


async def test_one_that_falls_behind_gets_a_snapshot_and_costs_no_memory() -> None:
    owner = Owner()
    with owner.feed.follow() as follower:
        await ready(follower)
        for number in range(3 * MAX_BACKLOG):
            owner.change(add=(number.to_bytes(2, "big"),))
            assert len(follower._backlog) <= MAX_BACKLOG
        [caught_up] = await ready(follower)
        owner.change(add=(b"next",))
        [after] = await ready(follower)

    assert isinstance(caught_up, KeysSnapshot)
    assert set(caught_up.keys) == set(owner.keys) - {b"next"}
    assert after.sequence == caught_up.sequence + 1


async def test_a_feed_that_closes_ends_whoever_waits() -> None:
    owner = Owner()
    with owner.feed.follow() as follower:
        await ready(follower)
        waiting = asyncio.ensure_future(follower.next())
        await asyncio.sleep(0)
        owner.feed.close()

        assert await waiting is None


@pytest.mark.asyncio
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["change", "look", "rush"]))))
async def test_a_follower_always_knows_the_set(steps: list[tuple[int, str]]) -> None:
    owner = Owner()
    known: set[bytes] = set()
    sequence = 0
    with owner.feed.follow() as follower:
        for number, step in [*steps, (0, "look")]:
            key = bytes([number])
            for _ in range(2 * MAX_BACKLOG if step == "rush" else step == "change"):
                if key in owner.keys:
                    owner.change(remove=(key,))
                else:
                    owner.change(add=(key,))
            if step != "look":
                continue
            for event in await ready(follower):
                if isinstance(event, KeysSnapshot):
                    known = set(event.keys)
                else:
                    assert event.sequence == sequence + 1
                    assert known.isdisjoint(event.keys) == event.added
                    known = known ^ set(event.keys)
                sequence = event.sequence
            assert known == set(owner.keys)

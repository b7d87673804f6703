from __future__ import annotations

import asyncio
from collections.abc import Sequence

from worker.messages import StepReport, StoredBlock
from worker.watch import EMPTY_LOAD, MAX_BACKLOG, BlocksEvent, LoadEvent, SnapshotEvent, WatchHub


def report(
    *, stored: list[bytes] | None = None, evicted: list[bytes] | None = None, num_steps: int = 0
) -> StepReport:
    load = EMPTY_LOAD._replace(num_steps=num_steps)
    blocks = [StoredBlock(key, b"", 0, 0, 1) for key in stored or []]
    return StepReport([], [], blocks, evicted or [], load, [], [], [], [], [], [], [])


def new_hub() -> WatchHub:
    hub = WatchHub()
    hub.restart("first", num_blocks=4)
    return hub


async def test_a_watcher_begins_with_all_that_is_cached() -> None:
    hub = new_hub()
    hub.apply(report(stored=[b"a", b"b"]))
    hub.apply(report(evicted=[b"a"]))

    with hub.watch() as watcher:
        event = await watcher.next()

    assert isinstance(event, SnapshotEvent)
    assert event.prefix_keys == (b"b",)


async def test_events_are_numbered_without_a_gap_from_the_snapshot_on() -> None:
    hub = new_hub()
    with hub.watch() as watcher:
        snapshot = await watcher.next()
        hub.apply(report(stored=[b"a"], evicted=[b"z"]))
        hub.apply(report(stored=[b"b"]))
        events = [await watcher.next() for _ in range(3)]

    assert snapshot is not None
    assert [event and event.sequence - snapshot.sequence for event in events] == [1, 2, 3]
    assert [isinstance(event, BlocksEvent) and event.stored for event in events] == [
        False,
        True,
        True,
    ]


async def test_every_watcher_sees_the_same_number_for_the_same_event() -> None:
    hub = new_hub()
    with hub.watch() as one:
        await one.next()
        hub.apply(report(stored=[b"a"]))
        with hub.watch() as two:
            await two.next()
            hub.apply(report(stored=[b"b"]))
            await one.next()

            assert await one.next() == await two.next()


async def test_a_watcher_too_far_behind_starts_over() -> None:
    hub = new_hub()
    with hub.watch() as watcher:
        await watcher.next()
        for index in range(MAX_BACKLOG + 1):
            hub.apply(report(stored=[str(index).encode()]))
        event = await watcher.next()

    assert isinstance(event, SnapshotEvent)
    assert len(event.prefix_keys) == MAX_BACKLOG + 1


async def test_a_new_core_has_an_empty_cache_and_another_name() -> None:
    hub = new_hub()
    hub.apply(report(stored=[b"a"]))
    with hub.watch() as watcher:
        await watcher.next()
        hub.restart("second", num_blocks=4)
        event = await watcher.next()

    assert isinstance(event, SnapshotEvent)
    assert (event.incarnation, event.prefix_keys) == ("second", ())


def test_what_was_evicted_is_told_and_so_is_what_a_core_took_along() -> None:
    hub = new_hub()
    told: list[Sequence[bytes]] = []
    hub.on_evicted = told.append
    hub.apply(report(stored=[b"a", b"b", b"c"]))
    hub.apply(report(evicted=[b"b"]))
    hub.restart("second", num_blocks=4)

    assert told == [[b"b"], [b"a", b"c"]]


async def test_load_is_told_when_there_is_nothing_else_to_say() -> None:
    hub = new_hub()
    with hub.watch() as watcher:
        await watcher.next()
        hub.apply(report(num_steps=1))
        hub.apply(report(stored=[b"a"], num_steps=2))
        blocks, load = await watcher.next(), await watcher.next()

    assert isinstance(blocks, BlocksEvent)
    assert isinstance(load, LoadEvent)
    assert load.load.num_steps == 2


async def test_closing_ends_every_watch_and_leaving_forgets_it() -> None:
    hub = new_hub()
    with hub.watch() as watcher:
        await watcher.next()
        waiting = asyncio.ensure_future(watcher.next())
        await asyncio.sleep(0)
        hub.close()

        assert await waiting is None
        assert hub.num_watchers == 1
    assert hub.num_watchers == 0


def test_the_cached_start_of_a_chain_is_known() -> None:
    hub = new_hub()
    hub.apply(report(stored=[b"a", b"b", b"d"]))

    assert hub.match([b"a", b"b", b"c", b"d"]) == 2
    assert hub.match([b"c"]) == 0

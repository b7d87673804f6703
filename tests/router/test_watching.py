"""Following holders of blocks, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from firsttoken.kvstore.v1 import kvstore_pb2
from firsttoken.worker.v1 import worker_pb2
from router.feed import Feed, Verdict
from router.reports import EvictedEvent, LoadEvent, Report, SnapshotEvent, StoredEvent, Tier
from router.watch_messages import SLICE_KEYS, Reading
from router.watching import MAX_OPENING, Holder, Watching
from services.core.keys import KEY_BYTES
from services.runtime.channels import Channels
from tests.runtime.waiting import eventually

Message = worker_pb2.WatchResponse


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(KEY_BYTES, "big") for number in numbers)


def snapshot(sequence: int, *numbers: int, incarnation: str = "a", **load: Any) -> Message:
    whole = worker_pb2.Snapshot(prefix_keys=keys(*numbers), load=worker_pb2.Load(**load))
    return Message(sequence=sequence, incarnation=incarnation, snapshot=whole)


def stored(sequence: int, *numbers: int, incarnation: str = "a") -> Message:
    blocks = worker_pb2.BlocksStored(prefix_keys=keys(*numbers))
    return Message(sequence=sequence, incarnation=incarnation, stored=blocks)


def evicted(sequence: int, *numbers: int) -> Message:
    blocks = worker_pb2.BlocksEvicted(prefix_keys=keys(*numbers))
    return Message(sequence=sequence, incarnation="a", evicted=blocks)


class Teller:
    """Says what a test wants it to: to each watcher the next of `scripts`, then the last again.

    A script that ends with None ends the stream; else it stays open.
    """

    def __init__(self, *scripts: Sequence[Message | None]) -> None:
        self.scripts = list(scripts)
        self.num_opened = 0
        self.num_open = 0

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Message]:
        script = self.scripts[min(self.num_opened, len(self.scripts) - 1)]
        self.num_opened += 1
        self.num_open += 1
        try:
            for message in script:
                if message is None:
                    return
                yield message
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


class Ears:
    """Keeps what it is told, and judges it as a router does."""

    def __init__(self) -> None:
        self.reports: dict[str, list[Report]] = {}
        self.held: dict[str, set[int]] = {}
        self.feeds: dict[str, Feed] = {}
        self.num_deaf = 0

    def hear(self, holder_id: str, report: Report) -> bool:
        self.reports.setdefault(holder_id, []).append(report)
        verdict = self.feeds.setdefault(holder_id, Feed()).judge(report)
        held = self.held.setdefault(holder_id, set())
        match report.event:
            case SnapshotEvent(prefix_keys, _, continues):
                if not continues:
                    held.clear()
                held |= {int.from_bytes(key, "big") for key in prefix_keys}
            case StoredEvent(prefix_keys) if verdict is Verdict.NEXT:
                held |= {int.from_bytes(key, "big") for key in prefix_keys}
            case EvictedEvent(prefix_keys) if verdict is Verdict.NEXT:
                held -= {int.from_bytes(key, "big") for key in prefix_keys}
        return verdict is not Verdict.GAP

    def deaf(self, holder_id: str) -> None:
        self.num_deaf += 1


@asynccontextmanager
async def serve(servicer: Any, port: int = 0) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    watch: Any = grpc.unary_stream_rpc_method_handler(
        servicer.Watch, response_serializer=lambda message: message.SerializeToString()
    )
    for service in ("worker.v1.WorkerService", "kvstore.v1.KvStoreService"):
        handler = grpc.method_handlers_generic_handler(f"firsttoken.{service}", {"Watch": watch})
        server.add_generic_rpc_handlers((handler,))
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@asynccontextmanager
async def watching(ears: Ears) -> AsyncIterator[Watching]:
    async with Channels() as channels, Watching(ears, channels) as watching:
        yield watching


def worker(address: str, name: str = "w") -> Holder:
    return Holder(name, address, Tier.WORKER)


def tasks(name: str) -> int:
    return sum(task.get_name().startswith(name) for task in asyncio.all_tasks())


async def test_what_a_worker_tells_is_heard_in_order() -> None:
    ears, teller = Ears(), Teller([snapshot(3, 1, 2, num_running=4), stored(4, 7), evicted(5, 1)])
    async with serve(teller) as address, watching(ears) as following:
        following.follow([worker(address)])
        await eventually(lambda: ears.held.get("w") == {2, 7})
        assert following.num_live == 1
    first = ears.reports["w"][0].event
    assert isinstance(first, SnapshotEvent)
    assert first.load is not None
    assert first.load.num_running == 4
    await eventually(lambda: teller.num_open == 0)


async def test_a_gap_brings_a_new_snapshot() -> None:
    ears, teller = Ears(), Teller([snapshot(1, 1), stored(3, 3)], [snapshot(3, 1, 2, 3)])
    async with serve(teller) as address, watching(ears) as following:
        following.follow([worker(address)])
        await eventually(lambda: ears.held.get("w") == {1, 2, 3})
        await eventually(lambda: teller.num_open == 1)
    assert teller.num_opened == 2


async def test_events_of_another_incarnation_bring_a_new_snapshot() -> None:
    first = [snapshot(1, 1), stored(2, 2, incarnation="b")]
    ears, teller = Ears(), Teller(first, [snapshot(2, 2, incarnation="b")])
    async with serve(teller) as address, watching(ears) as following:
        following.follow([worker(address)])
        await eventually(lambda: ears.held.get("w") == {2})


async def test_keys_that_are_not_whole_open_the_stream_again() -> None:
    torn = Message(sequence=2, incarnation="a", stored=worker_pb2.BlocksStored(prefix_keys=b"x"))
    ears, teller = Ears(), Teller([snapshot(1, 1), torn], [snapshot(2, 5)])
    async with serve(teller) as address, watching(ears) as following:
        following.follow([worker(address)])
        await eventually(lambda: ears.held.get("w") == {5})
    assert ears.num_deaf == 2  # the torn one, and the end


async def test_a_broken_stream_is_opened_again_when_its_worker_is_back() -> None:
    ears = Ears()
    async with watching(ears) as following:
        async with serve(Teller([snapshot(1, 1)])) as address:
            following.follow([worker(address)])
            await eventually(lambda: following.num_live == 1)
        await eventually(lambda: ears.num_deaf)
        assert following.num_live == 0
        async with serve(Teller([snapshot(1, 9)]), int(address.rpartition(":")[2])):
            await eventually(lambda: ears.held["w"] == {9})


async def test_a_stream_that_ends_at_once_is_asked_for_ever_less_often() -> None:
    ears, teller = Ears(), Teller([snapshot(1, 1), None])
    async with serve(teller) as address, watching(ears) as following:
        following.follow([worker(address)])
        await asyncio.sleep(0.5)
    # After 0.05, 0.1 and 0.2 s, or half of that.
    assert 2 <= teller.num_opened <= 5


async def test_who_is_followed_no_more_is_not_heard() -> None:
    ears, teller = Ears(), Teller([snapshot(1, 1)])
    async with serve(teller) as address, watching(ears) as following:
        following.follow([worker(address)])
        await eventually(lambda: following.num_live == 1)
        following.follow([])
        await eventually(lambda: teller.num_open == 0)
        await eventually(lambda: not tasks("watch "))
        assert ears.num_deaf == 1


async def test_a_worker_that_flaps_leaves_nothing_behind() -> None:
    ears, teller = Ears(), Teller([snapshot(1, 1)])
    async with serve(teller) as address, Channels() as channels, Watching(ears, channels) as all_:
        for turn in range(60):
            all_.follow([worker(address, f"w{turn}")])
            await asyncio.sleep(0.02 * (turn % 3))
            all_.follow([])
            channels.drop(address)
        await eventually(lambda: not tasks("watch "))
        await eventually(lambda: teller.num_open == 0)
        assert all_.num_followed == 0
        assert all_.openings.num_counted == 0


async def test_hundreds_of_silent_workers_do_not_keep_one_from_being_heard() -> None:
    ears, teller = Ears(), Teller([snapshot(1, 1)])
    async with serve(teller) as address, watching(ears) as following:
        nobody = [worker(f"127.0.0.1:{number}", f"n{number}") for number in range(1, 501)]
        following.follow([*nobody, worker(address)])
        await eventually(lambda: ears.held.get("w") == {1})


async def test_hundreds_that_never_answer_do_not_keep_one_from_being_heard() -> None:
    ears, mute, teller = Ears(), Teller([]), Teller([snapshot(1, 1)])
    async with serve(mute) as mute_address, serve(teller) as address, watching(ears) as following:
        mutes = [worker(mute_address, f"m{number}") for number in range(4 * MAX_OPENING)]
        following.follow(mutes)
        await eventually(lambda: mute.num_open >= MAX_OPENING)
        following.follow([*mutes, worker(address)])
        await eventually(lambda: ears.held.get("w") == {1})
        # None of the others has been given up yet.
        assert ears.num_deaf == 0
        await eventually(lambda: following.openings.num_counted == 0)


async def test_a_large_snapshot_lets_others_go_on_meanwhile() -> None:
    ears, num = Ears(), 100_000
    turns = 0

    async def beat() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += bool(ears.reports)

    beating = asyncio.create_task(beat())
    teller = Teller([snapshot(7, *range(num)), stored(8, num)])
    async with serve(teller) as address, watching(ears) as following:
        following.follow([worker(address)])
        await eventually(lambda: len(ears.held.get("w", ())) == num + 1)
    beating.cancel()
    reports = ears.reports["w"]
    assert len(reports) == -(-num // SLICE_KEYS) + 1
    assert turns >= len(reports) - 1
    assert all(len(report.event.prefix_keys) <= SLICE_KEYS for report in reports)  # type: ignore[union-attr]


class Store:
    async def Watch(self, request: Any, context: Any) -> AsyncIterator[kvstore_pb2.WatchResponse]:
        response = kvstore_pb2.WatchResponse
        yield response(sequence=0, incarnation="s", snapshot=keys(1))
        yield response(sequence=1, incarnation="s", stored=keys(2))
        yield response(sequence=2, incarnation="s", evicted=keys(1))
        await asyncio.Event().wait()


async def test_a_store_is_heard_as_a_worker_is() -> None:
    ears = Ears()
    async with serve(Store()) as address, watching(ears) as following:
        following.follow([Holder("s", address, Tier.NODE)])
        await eventually(lambda: ears.held.get("s") == {2})


@pytest.mark.parametrize("make", [stored, evicted])
def test_reports_of_a_long_message_are_numbered_without_a_gap(
    make: Callable[..., Message],
) -> None:
    reading, feed = Reading(), Feed()
    messages = [
        snapshot(5, *range(SLICE_KEYS * 2 + 1)),
        make(6, *range(SLICE_KEYS * 3)),
        Message(sequence=6, incarnation="a", load=worker_pb2.Load(num_running=1)),
        stored(7, 1),
    ]
    reports = [report for message in messages for report in reading.of_worker(message)]
    assert [feed.judge(report) for report in reports] == [Verdict.NEXT] * (3 + 3 + 1 + 1)
    assert isinstance(reports[6].event, LoadEvent)
    lost = next(reading.of_worker(stored(9, 2)))
    assert feed.judge(lost) is Verdict.GAP

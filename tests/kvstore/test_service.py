from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from firsttoken.kvstore.v1 import kvstore_pb2
from kvstore.eviction import POLICIES
from router.watch_messages import Reading
from services.core.keys import KEY_BYTES, split_keys
from services.core.kvblocks import Bytes, checksum, copy_block, payload
from services.runtime.changes import MAX_BACKLOG
from services.runtime.channels import MAX_MESSAGE_BYTES
from tests.kvstore.blocks import (
    FINGERPRINT,
    NUM_BYTES,
    PRESENT,
    REFUSED,
    RESERVED,
    Chain,
    Client,
    commit_request,
    header_of,
    make_chain,
    nothing_reserved,
    place_of,
    reserve_request,
)
from tests.kvstore.serving import running
from tests.kvstore.test_memory_tier import put
from tests.router.test_watching import Ears
from tests.runtime.waiting import eventually


async def test_what_was_put_as_bytes_is_given_as_bytes() -> None:
    chain = make_chain("a", 5)
    async with running() as (_, client, _):
        committed = await client.put(chain)
        matched = await client.match(chain)
        datas = await client.datas(chain, [4, 0, 2])
        stats = await client.stats()

    assert committed == 5
    assert matched == (5, 5)
    assert datas == [chain.datas[4], chain.datas[0], chain.datas[2]]
    assert stats.l1.num_blocks == 5
    assert stats.l1.num_hits == 3
    assert stats.l1.bytes_written == 5 * NUM_BYTES


async def test_what_was_written_into_the_arena_is_copied_out_of_it() -> None:
    chain = make_chain("a", 3)
    async with running() as (_, client, arena):
        committed = await client.put(chain, arena=arena)
        into = np.empty((3, NUM_BYTES), dtype=np.uint8)
        answers = await client.get(chain, mapped=True)
        reasons = [
            copy_block(arena, place_of(answer), block, into[index])
            for index, (answer, block) in enumerate(zip(answers, chain.blocks, strict=True))
        ]

    assert committed == 3
    assert reasons == ["", "", ""]
    assert [each.tobytes() for each in into] == list(chain.datas)


async def test_a_chain_matches_up_to_its_first_gap() -> None:
    chain = make_chain("a", 4)
    other = make_chain("b", 4, onto=make_chain("a", 2))
    async with running() as (store, client, _):
        await client.put(chain)
        assert await client.match(other) == (2, 2)
        store.tier1.drop([chain.keys[1]])

        assert await client.match(chain) == (1, 1)
        assert await client.datas(chain) == [
            chain.datas[0],
            None,
            chain.datas[2],
            chain.datas[3],
        ]


async def test_what_is_here_or_on_its_way_is_not_taken_again() -> None:
    chain = make_chain("a", 3)
    async with running() as (_, client, _):
        first, second = client.stub.Put(), client.stub.Put()
        await first.write(reserve_request(chain, [0, 1]))
        await first.read()
        await first.write(commit_request(chain, [0]))
        await first.read()
        await second.write(reserve_request(chain))
        answer = await second.read()
        first.cancel()
        second.cancel()

    assert isinstance(answer, kvstore_pb2.PutResponse)
    states = [each.state for each in answer.reserved.reservations]
    assert states == [PRESENT, PRESENT, RESERVED]


@pytest.mark.parametrize("mapped", [False, True], ids=["bytes", "mapped"])
async def test_who_expects_other_blocks_misses_them_and_leaves_them_to_others(
    mapped: bool,
) -> None:
    chain = make_chain("a", 10)
    async with running() as (_, client, _):
        await client.put(chain)
        unlike = [
            *await client.get(chain, mapped=mapped, fingerprint=b"another engine"),
            *await client.get(chain, mapped=mapped, num_bytes=NUM_BYTES + 1),
        ]
        stats = await client.stats()

        assert await client.match(chain) == (10, 10)
        assert await client.datas(chain) == list(chain.datas)

    assert not any(each.WhichOneof("place") for each in unlike)
    assert dict(stats.rejected) == {"fingerprint": 10, "size": 10}
    assert (stats.l1.num_hits, stats.l1.num_misses) == (0, 20)


async def test_a_block_cannot_be_found_before_it_is_committed() -> None:
    chain = make_chain("a", 2)
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(reserve_request(chain))
        await call.read()

        assert await client.match(chain) == (0, 0)
        assert await client.datas(chain) == [None, None]

        call.cancel()


@pytest.mark.parametrize("ending", ["cancel", "half-close", "error"])
async def test_a_writer_that_ends_leaves_nothing_reserved(ending: str) -> None:
    chain = make_chain("a", 4)
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(reserve_request(chain))
        await call.read()
        assert (await client.stats()).num_reserved == 4

        if ending == "cancel":
            call.cancel()
        elif ending == "half-close":
            await call.done_writing()
        else:
            await call.write(kvstore_pb2.PutRequest())
        await nothing_reserved(client)

        assert await client.put(chain) == 4


async def test_a_writer_that_hung_up_does_not_decide_the_size_of_all_blocks() -> None:
    chain, large = make_chain("a", 4), make_chain("large", 1, num_bytes=30 * NUM_BYTES)
    async with running() as (_, client, arena):
        call = client.stub.Put()
        await call.write(reserve_request(large, mapped=True))
        await call.read()
        assert (await client.stats()).l1.capacity_blocks == 1
        call.cancel()
        await nothing_reserved(client)

        assert await client.put(chain, arena=arena) == 4
        answers = await client.get(chain, mapped=True)
        into = np.empty(NUM_BYTES, dtype=np.uint8)
        for answer, block, data in zip(answers, chain.blocks, chain.datas, strict=True):
            assert copy_block(arena, place_of(answer), block, into) == ""
            assert into.tobytes() == data
        stats = await client.stats()

    assert (stats.l1.num_blocks, stats.l1.capacity_blocks) == (4, 40)
    assert not stats.rejected


async def test_a_commit_that_was_cut_off_frees_its_places_when_the_thread_has_ended() -> None:
    chain = make_chain("a", 6)
    async with running() as (store, client, _):
        for _ in range(20):
            call = client.stub.Put()
            await call.write(reserve_request(chain))
            await call.read()
            await call.write(commit_request(chain, range(6)))
            await asyncio.sleep(0)
            call.cancel()
            await nothing_reserved(client)
            store.tier1.drop(chain.keys)
            store.check_integrity()


async def test_bytes_that_are_not_what_was_announced_are_refused_and_counted() -> None:
    chain = make_chain("a", 3)
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(reserve_request(chain))
        await call.read()
        commit = commit_request(chain, range(3))
        commit.commit.blocks[0].data = b"\0" * NUM_BYTES
        commit.commit.blocks[1].data = chain.datas[1][:-1]
        await call.write(commit)
        answer = await call.read()
        await call.done_writing()
        await call.read()
        stats = await client.stats()
        datas = await client.datas(chain)

    assert isinstance(answer, kvstore_pb2.PutResponse)
    assert answer.committed.num_blocks == 1
    assert dict(stats.rejected) == {"checksum": 1, "size": 1}
    assert datas == [None, None, chain.datas[2]]


async def test_an_arena_that_does_not_hold_what_was_announced_is_refused() -> None:
    chain = make_chain("a", 1)
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(reserve_request(chain, mapped=True))
        await call.read()
        await call.write(commit_request(chain, [0], mapped=True))
        answer = await call.read()
        await call.done_writing()
        await call.read()

        assert isinstance(answer, kvstore_pb2.PutResponse)
        assert answer.committed.num_blocks == 0
        assert await client.match(chain) == (0, 0)


async def test_the_first_size_is_the_only_one() -> None:
    async with running() as (_, client, _):
        await client.put(make_chain("a", 1))
        committed = await client.put(make_chain("b", 1, num_bytes=NUM_BYTES // 2))
        stats = await client.stats()

    assert committed == 0
    assert dict(stats.rejected) == {"slot_size": 1}


async def test_a_block_larger_than_the_arena_does_not_decide_the_size() -> None:
    async with running(num_slots=2) as (_, client, _):
        assert await client.put(make_chain("b", 1, num_bytes=3 * NUM_BYTES)) == 0
        assert await client.put(make_chain("a", 1)) == 1


async def test_a_full_arena_makes_room_and_tails_go_before_heads() -> None:
    async with running(num_slots=8) as (_, client, _):
        old, new = make_chain("old", 6), make_chain("new", 2)
        for index in range(6):
            await client.put(make_chain("old", index + 1))
        await client.put(new)
        await client.put(make_chain("newer", 2))
        stats = await client.stats()
        matched = await client.match(old)

    assert matched == (4, 4)
    assert stats.l1.num_blocks == stats.l1.capacity_blocks == 8
    assert stats.l1.num_evicted == 2


async def test_no_writer_holds_more_than_its_share_of_the_slots() -> None:
    chain = make_chain("a", 40)
    async with running(num_slots=40) as (_, client, _):
        calls = [client.stub.Put() for _ in range(3)]
        granted = []
        for number, call in enumerate(calls):
            await call.write(reserve_request(make_chain(f"{number}", 40)))
            answer = await call.read()
            assert isinstance(answer, kvstore_pb2.PutResponse)
            granted.append([each.state for each in answer.reserved.reservations].count(RESERVED))
        for call in calls:
            call.cancel()
        await nothing_reserved(client)
        # Everything is free again; a chain goes in piece by piece.
        for length in (10, 20, 30, 40):
            await client.put(make_chain("a", length))

        assert granted == [10, 10, 0]
        assert await client.match(chain) == (40, 40)


async def test_a_tenant_at_its_share_pushes_out_its_own_blocks() -> None:
    async with running(num_slots=40, share=0.25) as (_, client, _):
        quiet = make_chain("quiet", 10)
        await client.put(quiet, tenant="quiet")
        for number in range(30):
            await client.put(make_chain(f"loud {number}", 4), tenant="loud")
        stats = await client.stats()

        assert await client.match(quiet) == (10, 10)

    by_tenant = {each.tenant: each for each in stats.tenants}
    assert by_tenant["loud"].num_blocks == 10
    assert by_tenant["loud"].num_evicted == 110
    assert by_tenant["quiet"].num_evicted == 0


async def test_a_tenant_may_borrow_what_no_share_limits() -> None:
    async with running(num_slots=40) as (_, client, _):
        for number in range(10):
            await client.put(make_chain(f"loud {number}", 4), tenant="loud")
        stats = await client.stats()

    assert [each.num_blocks for each in stats.tenants] == [40]


async def test_many_tenants_are_counted_together() -> None:
    async with running(num_slots=100) as (_, client, _):
        for number in range(80):
            await client.put(make_chain(f"{number}", 1), tenant=f"tenant {number}")
        stats = await client.stats()

    by_tenant = {each.tenant: each.num_blocks for each in stats.tenants}
    assert len(by_tenant) == 65
    assert by_tenant["other"] == 16


@pytest.mark.parametrize(
    ("expected", "reason"),
    [({"fingerprint": b"another engine"}, "fingerprint"), ({"num_bytes": 99}, "size")],
)
async def test_another_block_than_the_reader_expects_is_a_miss(
    expected: dict[str, object], reason: str
) -> None:
    chain = make_chain("a", 1)
    async with running() as (_, client, _):
        await client.put(chain)
        answers = await client.get(chain, **expected)  # type: ignore[arg-type]
        stats = await client.stats()

    assert not answers[0].HasField("header")
    assert dict(stats.rejected) == {reason: 1}
    assert stats.l1.num_misses == 1


async def test_a_damaged_block_is_a_miss_and_gone() -> None:
    chain = make_chain("a", 3)
    async with running() as (_, client, arena):
        await client.put(chain)
        (damaged,) = await client.get(chain, [1], mapped=True)
        payload(arena, damaged.mapped.slot, NUM_BYTES)[77] ^= 1

        assert await client.datas(chain) == [chain.datas[0], None, chain.datas[2]]
        assert await client.match(chain) == (1, 1)
        assert dict((await client.stats()).rejected) == {"checksum": 1}
        assert await client.put(chain) == 1
        assert await client.datas(chain) == list(chain.datas)


async def test_a_damaged_block_that_was_given_by_place_is_found_behind_the_answer() -> None:
    chain = make_chain("a", 1)
    async with running() as (store, client, arena):
        await client.put(chain)
        payload(arena, store.tier1.index.slot_of(chain.keys[0]), NUM_BYTES)[77] ^= 1
        await client.get(chain, mapped=True)
        await eventually(lambda: store.tier1.counters.rejected["checksum"] == 1)

        assert await client.match(chain) == (0, 0)


async def test_a_block_given_lately_is_evicted_last() -> None:
    async with running(num_slots=8) as (_, client, _):
        given = make_chain("given", 2)
        await client.put(given)
        answers = await client.get(given, mapped=True)
        for number in range(12):
            await client.put(make_chain(f"{number}", 1))
        again = await client.get(given, mapped=True)

    assert [place_of(each) for each in again] == [place_of(each) for each in answers]


async def test_watchers_see_a_snapshot_and_then_every_change() -> None:
    first, second = make_chain("a", 2), make_chain("b", 1)
    async with running() as (store, client, _):
        await client.put(first)
        call = client.stub.Watch(kvstore_pb2.WatchRequest())
        snapshot = await call.read()
        await client.put(second)
        stored = await call.read()
        await client.stub.Evict(kvstore_pb2.EvictRequest(storage_keys=first.joined))
        evicted = await call.read()
        call.cancel()
        incarnation = store.tier1.incarnation

    assert isinstance(snapshot, kvstore_pb2.WatchResponse)
    assert isinstance(stored, kvstore_pb2.WatchResponse)
    assert isinstance(evicted, kvstore_pb2.WatchResponse)
    prefixes = b"".join(block.prefix_key for block in first.blocks)
    assert snapshot.snapshot == evicted.evicted == prefixes
    assert stored.stored == second.blocks[0].prefix_key
    assert [each.sequence for each in (snapshot, stored, evicted)] == [1, 2, 3]
    assert {each.incarnation for each in (snapshot, stored, evicted)} == {incarnation}


async def test_more_blocks_than_one_message_can_carry_are_told_in_parts() -> None:
    num, ears, reading = MAX_MESSAGE_BYTES // KEY_BYTES + 1, Ears(), Reading()
    async with running() as (store, client, _):
        own = store.tier1.feed.keys
        store.tier1.feed.keys = [key.to_bytes(KEY_BYTES, "big") for key in range(num)]
        call = client.stub.Watch(kvstore_pb2.WatchRequest())
        while len(ears.held.get("s", ())) < num:
            event = await call.read()
            assert isinstance(event, kvstore_pb2.WatchResponse)
            assert all(ears.hear("s", each) for each in reading.of_store(event))
        call.cancel()
        store.tier1.feed.keys = own

    assert ears.held["s"] == set(range(num))


@pytest.mark.parametrize("num_puts", [3, 3 * MAX_BACKLOG], ids=["few", "more than may wait"])
async def test_a_watcher_hears_each_change_or_a_snapshot_of_them(num_puts: int) -> None:
    async with running(num_slots=4) as (store, client, _):
        call = client.stub.Watch(kvstore_pb2.WatchRequest())
        await call.read()
        for number in range(num_puts):  # at once: nobody can read meanwhile
            put(store.tier1, make_chain(f"{number}", 1))
        last = store.tier1.feed.snapshot()
        known: set[bytes] = set()
        snapshots: list[int] = []
        sequence = 0
        while sequence < last.sequence:
            event = await call.read()
            assert isinstance(event, kvstore_pb2.WatchResponse)
            known, is_snapshot = follow(known, event)
            assert is_snapshot or event.sequence == sequence + 1
            sequence = event.sequence
            snapshots += [sequence] * is_snapshot
        call.cancel()

    assert known == set(last.keys)
    assert snapshots == ([last.sequence] if num_puts > MAX_BACKLOG else [])


def follow(known: set[bytes], event: kvstore_pb2.WatchResponse) -> tuple[set[bytes], bool]:
    """What a watcher knows after an event, and whether that was a snapshot."""
    kind = event.WhichOneof("event")
    keys = set(split_keys(event.snapshot or event.stored or event.evicted))
    if kind == "stored":
        assert not known & keys
        return known | keys, False
    if kind == "evicted":
        assert keys <= known
        return known - keys, False
    return keys, True


async def test_a_prefix_known_twice_goes_when_its_last_block_goes() -> None:
    one = make_chain("a", 1)
    other = make_chain("a", 1, fingerprint=b"another engine")
    async with running() as (store, client, _):
        call = client.stub.Watch(kvstore_pb2.WatchRequest())
        await call.read()
        await client.put(one)
        await client.put(other)
        store.tier1.drop(one.keys)
        store.tier1.drop(other.keys)
        events = [await call.read() for _ in range(2)]
        call.cancel()

    kinds = [
        each.WhichOneof("event") for each in events if isinstance(each, kvstore_pb2.WatchResponse)
    ]
    assert kinds == ["stored", "evicted"]


async def test_eviction_by_hand_needs_a_selection() -> None:
    ours, theirs = make_chain("a", 2), make_chain("b", 3)
    async with running() as (_, client, _):
        await client.put(ours, tenant="us")
        await client.put(theirs, tenant="them")
        dropped = [
            (await client.stub.Evict(request)).num_l1
            for request in (
                kvstore_pb2.EvictRequest(),
                kvstore_pb2.EvictRequest(all=False),
                kvstore_pb2.EvictRequest(tenant="us"),
                kvstore_pb2.EvictRequest(storage_keys=theirs.keys[0]),
                kvstore_pb2.EvictRequest(all=True),
            )
        ]

    assert dropped == [0, 0, 2, 1, 2]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("reserve.headers.storage_key", {"storage_key": b"x" * 32}),
        ("reserve.headers.storage_key", {"prefix_key": b"x" * 32}),
        ("reserve.headers.prefix_key", {"prefix_key": b""}),
        ("reserve.headers.prefix_key", {"prefix_key": b"x" * 31}),
        ("reserve.headers.prefix_key", {"prefix_key": b"x" * 33}),
        ("reserve.headers.fingerprint", {"fingerprint": b""}),
        ("reserve.headers.fingerprint", {"fingerprint": b"f" * 65}),
        ("reserve.headers.index", {"index": 1}),
        ("reserve.headers", {"num_bytes": 0}),
        ("reserve.headers.num_bytes", {"num_bytes": 1 << 30}),
        ("reserve.headers.tenant", {"tenant": "t" * 129}),
        ("reserve.chain", {}),
    ],
    ids=str,
)
async def test_a_header_that_makes_no_sense_is_refused_by_name(
    field: str, change: dict[str, object]
) -> None:
    chain = make_chain("a", 1)
    request = reserve_request(chain)
    for name, value in change.items():
        setattr(request.reserve.headers[0], name, value)
    if not change:
        request.reserve.chain = b"not whole keys"
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert _fields(caught.value) == [field]


async def test_another_split_of_the_same_key_is_refused() -> None:
    """The key hashes the prefix key and the fingerprint, one after the other."""
    chain = make_chain("a", 1)
    request = reserve_request(chain)
    header = request.reserve.headers[0]
    header.fingerprint = header.prefix_key[31:] + header.fingerprint
    header.prefix_key = header.prefix_key[:31]
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError, match="must be 32 bytes; got 31"):
            await call.read()


@pytest.mark.parametrize(
    ("indices", "length", "field", "message"),
    [
        ([0, 0], 1, "reserve.headers", "must be at most 1, for a chain of 1; got 2"),
        ([1, 1], 2, "reserve.headers.index", "must not be there twice"),
        ([0] * 5000, 5000, "reserve.headers", "at most 4096, for a chain of 5000; got 5000"),
    ],
    ids=["more than the chain has", "twice", "too many"],
)
async def test_a_writer_names_each_block_of_the_chain_once_at_most(
    indices: list[int], length: int, field: str, message: str
) -> None:
    chain = make_chain("a", length, num_bytes=1)
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(reserve_request(chain, indices))
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await call.read()
        await nothing_reserved(client)

    assert _fields(caught.value) == [field]


@pytest.mark.parametrize(
    "change", [{"num_bytes": NUM_BYTES - 1}, {"index": 1}, {"num_tokens": 1}], ids=str
)
async def test_a_block_under_the_key_of_another_heals_when_that_is_put(
    change: dict[str, Any],
) -> None:
    chain, other = make_chain("a", 1), make_chain("b", 1)
    wrong = replace(chain.blocks[0], **change)
    squatter = Chain(
        (*other.blocks[: wrong.index], wrong),
        (*other.datas[: wrong.index], bytes(wrong.num_bytes)),
    )
    async with running() as (_, client, _):
        await client.put(squatter)

        assert await client.put(chain) == 1
        assert await client.datas(chain) == list(chain.datas)
        assert await client.put(chain) == 0


@pytest.mark.parametrize("policy", POLICIES)
async def test_chains_that_are_each_others_reverse_do_not_fill_the_store(policy: str) -> None:
    async with running(num_slots=8, policy=policy) as (_, client, _):
        for number in range(4):
            forth = make_chain(f"{number}", 2)
            back = Chain(
                tuple(replace(b, index=i) for i, b in enumerate(forth.blocks[::-1])),
                forth.datas[::-1],
            )
            await client.put(forth, [1])
            await client.put(back, [1])
        assert (await client.stats()).l1.num_blocks == 8

        assert await client.put(make_chain("a", 2)) == 2


async def test_a_chain_that_has_a_key_twice_is_refused_by_name() -> None:
    chain = make_chain("a", 1)
    request = reserve_request(chain)
    request.reserve.headers[0].index = 1
    request.reserve.chain = twice = 2 * chain.joined
    get = kvstore_pb2.GetRequest(chain=twice, fingerprint=FINGERPRINT, num_bytes=NUM_BYTES)
    async with running() as (_, client, _):
        put = client.stub.Put()
        await put.write(request)
        fields = []
        for answer in (
            put.read(),
            client.stub.Match(kvstore_pb2.MatchRequest(chain=twice)),
            client.stub.Get(get).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            fields += _fields(caught.value)
        await nothing_reserved(client)

    assert fields == ["reserve.chain", "chain", "chain"]


async def test_a_commit_of_what_was_not_reserved_is_refused() -> None:
    chain = make_chain("a", 1)
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(commit_request(chain, [0]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert _fields(caught.value) == ["commit.blocks.storage_key"]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("chain", kvstore_pb2.GetRequest(chain=b"odd", num_bytes=1)),
        ("indices", kvstore_pb2.GetRequest(chain=b"k" * 32, indices=[1], num_bytes=1)),
        ("fingerprint", kvstore_pb2.GetRequest(chain=b"k" * 32, num_bytes=1)),
        (
            "fingerprint",
            kvstore_pb2.GetRequest(chain=b"k" * 32, fingerprint=b"f" * 65, num_bytes=1),
        ),
        ("num_bytes", kvstore_pb2.GetRequest(chain=b"k" * 32, fingerprint=b"f")),
        (
            "num_bytes",
            kvstore_pb2.GetRequest(chain=b"k" * 32, fingerprint=b"f", num_bytes=1 << 30),
        ),
    ],
    ids=["odd chain", "index", "no fingerprint", "long fingerprint", "no size", "large size"],
)
async def test_a_read_that_makes_no_sense_is_refused_by_name(
    field: str, request_: kvstore_pb2.GetRequest
) -> None:
    async with running() as (_, client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Get(request_).read()

    assert _fields(caught.value) == [field]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 1, 2, 0], "must be at most 3, the chain's length; got 4"),
        ([1, 1], "must not have an index twice"),
        ([0, 3], "must be below 3, the chain's length"),
    ],
)
async def test_a_read_wants_each_block_of_the_chain_once_at_most(
    indices: list[int], message: str
) -> None:
    chain = make_chain("a", 3)
    async with running() as (_, client, _):
        await client.put(chain)
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await client.get(chain, indices)
        stats = await client.stats()

    assert _fields(caught.value) == ["indices"]
    assert (stats.l1.num_hits, stats.l1.num_misses) == (0, 0)


async def test_a_commit_of_too_much_leaves_nothing_reserved() -> None:
    chain = make_chain("a", 3)
    async with running() as (_, client, _):
        call = client.stub.Put()
        await call.write(reserve_request(chain, [0, 1]))
        await call.read()
        await call.write(commit_request(chain, [0, 1, 2]))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await nothing_reserved(client)

        assert await client.put(chain) == 3


async def test_many_writers_and_readers_at_once_never_see_a_wrong_block() -> None:
    chains = [make_chain(f"{number}", 6) for number in range(12)]

    async def work(client: Client, arena: Bytes, number: int) -> int:
        rng = np.random.default_rng(number)
        num_hits = 0
        into = np.empty(NUM_BYTES, dtype=np.uint8)
        for _ in range(25):
            chain = chains[int(rng.integers(len(chains)))]
            await client.put(chain, arena=arena if number % 2 else None)
            for answer in await client.get(chain, mapped=True):
                if answer.HasField("mapped"):
                    block = chain.blocks[answer.index]
                    if not copy_block(arena, place_of(answer), block, into):
                        assert into.tobytes() == chain.datas[answer.index]
                        num_hits += 1
        return num_hits

    async with running(num_slots=30, policy="s3fifo") as (store, client, arena):
        hits = await asyncio.gather(*(work(client, arena, number) for number in range(4)))
        stats = await client.stats()
        store.check_integrity()

    assert all(hits)
    assert stats.l1.num_evicted
    assert dict(stats.rejected).keys() <= {"no_room"}


async def test_the_checksum_of_a_header_is_that_of_the_bytes() -> None:
    chain = make_chain("a", 1)
    async with running() as (_, client, _):
        await client.put(chain, tenant="t")
        (answer,) = await client.get(chain)

    expected = header_of(chain.blocks[0], "t")
    expected.checksum = checksum(chain.datas[0])
    assert answer.header == expected
    assert answer.header.fingerprint == FINGERPRINT


async def test_refused_places_are_told_one_by_one() -> None:
    async with running(num_slots=2) as (_, client, _):
        call = client.stub.Put()
        await call.write(reserve_request(make_chain("a", 3)))
        answer = await call.read()
        call.cancel()

    assert isinstance(answer, kvstore_pb2.PutResponse)
    states = [each.state for each in answer.reserved.reservations]
    assert states == [RESERVED, REFUSED, REFUSED]


def _fields(error: grpc.aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(error)
    assert status is not None
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    return [violation.field for violation in bad.field_violations]

"""What any service of the mesh may rely on, whatever its calls go over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.runtime.channels import MAX_MESSAGE_BYTES
from services.runtime.telemetry import TraceContext
from services.runtime.tls import Tls
from tests.runtime.waiting import eventually
from tests.transports.ground import (
    MANY_MANY,
    MANY_ONE,
    ONE_MANY,
    ONE_ONE,
    SHAPES,
    Ground,
    Plan,
    Transport,
    prepare,
    take,
)

Code = grpc.StatusCode
DEADLINE_S = 0.3
# gRPC rounds up what it tells the server.
ROUNDED_S = 0.005
# Long enough for a machine that is busy; where it would run out, the test fails.
GENEROUS_S = 30.0
REQUESTS = [b"one", b"", b"three"]
# What a server may take for a stream that nobody reads, before it waits.
MAX_UNREAD_BYTES = 8 << 20


def requests_of(shape: str) -> Any:
    return REQUESTS if shape in (MANY_ONE, MANY_MANY) else REQUESTS[0]


def expected(shape: str, plan: Plan) -> list[bytes]:
    sent = REQUESTS if shape in (MANY_ONE, MANY_MANY) else REQUESTS[:1]
    return plan.replies(shape, sent)


async def unending() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"
    await asyncio.Event().wait()


async def refusal(shape: str, call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await take(shape, call)
    return caught.value


async def test_every_shape_gives_its_bytes_over_the_transport_it_should(ground: Ground) -> None:
    plan = Plan(sizes=(0, 100_000, 7))
    replies = [await take(shape, ground.begin(shape, plan, requests_of(shape))) for shape in SHAPES]

    assert replies == [expected(shape, plan) for shape in SHAPES]
    assert ground.service.peer.startswith("unix" if ground.transport.wire == "unix" else "ipv4")
    assert ground.is_at_rest()


async def test_a_deadline_is_told_to_the_server_and_ends_the_call_at_both_ends(
    ground: Ground,
) -> None:
    calls = [
        ground.begin(
            shape, Plan(number, (5, 5, 5), hold_at=0), requests_of(shape), timeout=DEADLINE_S
        )
        for number, shape in enumerate(SHAPES)
    ]
    refusals = await asyncio.gather(*map(refusal, SHAPES, calls))

    await eventually(ground.is_at_rest)
    assert [each.code() for each in refusals] == [Code.DEADLINE_EXCEEDED] * 4
    assert ground.service.ended == dict.fromkeys(range(4), "cancelled")
    told_s = ground.service.remaining_s
    assert len(told_s) == 4
    assert 0 < min(told_s.values()) <= max(told_s.values()) <= DEADLINE_S + ROUNDED_S


async def test_a_call_without_a_deadline_is_told_none(ground: Ground) -> None:
    await ground.begin(ONE_ONE, Plan())

    assert ground.service.remaining_s == {}


@pytest.mark.parametrize("hold_at", [0, 1, 3])
async def test_a_cancelled_call_cancels_its_handler(ground: Ground, hold_at: int) -> None:
    """Before the first message, between messages, and between the last one and the status."""
    shapes = [ONE_MANY, MANY_MANY, *([ONE_ONE, MANY_ONE] if hold_at == 0 else [])]
    calls = {}
    for number, shape in enumerate(shapes):
        plan = Plan(number, (5, 5, 5), hold_at=hold_at)
        calls[number] = ground.begin(shape, plan, requests_of(shape))
        for index in range(hold_at):
            assert await calls[number].read() == expected(shape, plan)[index]
    await eventually(lambda: ground.service.holding == set(calls))
    for call in calls.values():
        assert call.cancel()

    await eventually(ground.is_at_rest)
    assert ground.service.ended == dict.fromkeys(calls, "cancelled")
    assert [await call.code() for call in calls.values()] == [Code.CANCELLED] * len(calls)


async def test_a_call_cancelled_between_its_requests_cancels_its_handler(ground: Ground) -> None:
    plan = Plan(sizes=(5, 5, 5))
    calls = [
        ground.begin(shape, plan._replace(id=number), unending())
        for number, shape in enumerate((MANY_ONE, MANY_MANY))
    ]
    await calls[1].read()
    await eventually(lambda: ground.service.num_open == 2)
    for call in calls:
        call.cancel()

    await eventually(ground.is_at_rest)
    assert ground.service.ended == {0: "cancelled", 1: "cancelled"}


async def test_a_call_cancelled_before_it_was_sent_leaves_nothing(ground: Ground) -> None:
    for shape in SHAPES:
        ground.begin(shape, Plan(hold_at=0), requests_of(shape)).cancel()

    await eventually(ground.is_at_rest)
    assert await ground.answers()


async def test_a_call_cancelled_while_the_server_cannot_write_cancels_its_handler(
    ground: Ground,
) -> None:
    plan = Plan(sizes=(1 << 20,) * 100)
    call = ground.begin(ONE_MANY, plan)
    await call.read()
    await until_it_waits(ground, plan)
    call.cancel()

    await eventually(ground.is_at_rest)
    assert ground.service.ended == {plan.id: "cancelled"}


async def test_metadata_and_trace_arrive_unchanged(ground: Ground) -> None:
    trace = TraceContext.new()._replace(tracestate="a=1,b=2").child(sampled=True)
    sent = [
        ("text", "with spaces and , = ~"),
        ("twice", "one"),
        ("twice", "two"),
        ("all-bin", bytes(range(256))),
        ("empty-bin", b""),
        ("long", "x" * 4000),
        *trace.metadata(),
    ]
    call = ground.begin(ONE_MANY, Plan(), metadata=sent)
    await take(ONE_MANY, call)

    # Of other keys the order may be another.
    for key, _ in sent:
        values = [value for got, value in ground.service.metadata[0] if got == key]
        assert values == [value for given, value in sent if given == key]
    assert ground.service.trace[0] == trace
    trailing = dict(list(await call.trailing_metadata()))
    assert trailing == {"told": "text", "told-bin": bytes(range(256))}


async def test_an_error_arrives_with_its_details_and_trailing_metadata(ground: Ground) -> None:
    for shape in SHAPES:
        requests: Any = REQUESTS[:1] if shape in (MANY_ONE, MANY_MANY) else REQUESTS[0]
        error = await refusal(shape, ground.begin(shape, Plan(fails=True), requests))
        status = rpc_status.from_call(error)
        assert status is not None
        details = error_details_pb2.BadRequest()
        status.details[1].Unpack(details)

        assert error.code() is Code.INVALID_ARGUMENT
        assert details.field_violations[0].field == "sizes"
        assert dict(list(error.trailing_metadata()))["told-bin"] == bytes(range(256))
    await eventually(ground.is_at_rest)


async def test_a_refusal_while_requests_are_sent_may_hide_its_reason(ground: Ground) -> None:
    """grpc.aio 1.76: INTERNAL then. Who sends many requests must take it for any status."""
    call = ground.begin(MANY_MANY, Plan(fails=True), [bytes(100_000)] * 3)
    error = await refusal(MANY_MANY, call)

    assert error.code() in (Code.INVALID_ARGUMENT, Code.INTERNAL)
    await eventually(ground.is_at_rest)
    assert await ground.answers()


async def until_it_waits(ground: Ground, plan: Plan) -> int:
    """Bytes that the server has sent when it sends no more."""
    seen = -1

    async def is_still() -> bool:
        nonlocal seen
        before, seen = seen, ground.service.num_sent_bytes[plan.id]
        await asyncio.sleep(0.1)
        return 0 < seen == before

    await eventually(is_still, "the server to wait")
    return seen


async def test_a_slow_reader_stops_its_own_stream_alone_and_early(ground: Ground) -> None:
    plan = Plan(sizes=(1 << 16,) * 500)
    slow = ground.begin(ONE_MANY, plan)
    first = await slow.read()
    num_bytes = await until_it_waits(ground, plan)
    other = Plan(1, sizes=(1 << 16,) * 50)
    others = await take(ONE_MANY, ground.begin(ONE_MANY, other, timeout=GENEROUS_S))

    assert others == expected(ONE_MANY, other)
    assert await ground.answers()
    assert num_bytes <= MAX_UNREAD_BYTES
    assert ground.service.num_sent_bytes[plan.id] == num_bytes
    assert [first, *await take(ONE_MANY, slow)] == expected(ONE_MANY, plan)


async def test_the_largest_message_passes(ground: Ground) -> None:
    plan = Plan(sizes=(MAX_MESSAGE_BYTES - 16,))
    request = bytes(MAX_MESSAGE_BYTES)

    assert await take(ONE_ONE, ground.begin(ONE_ONE, plan, request)) == plan.replies(
        ONE_ONE, [request]
    )


async def test_a_message_too_long_is_refused_and_the_connection_goes_on(
    transport: Transport, tls: Tls
) -> None:
    limit = 1 << 18
    async with prepare(transport, tls, proxied=True, max_message_bytes=limit) as ground:
        assert ground.proxy is not None
        held = Plan(9, (5, 5), hold_at=1)
        beside = ground.begin(ONE_MANY, held)
        await beside.read()
        await ground.answers()
        num_connections = ground.proxy.num_accepted
        request_too_long = ground.begin(MANY_ONE, Plan(), [b"", bytes(limit + 1)])
        reply_too_long = ground.begin(ONE_MANY, Plan(sizes=(limit + 1,)))
        never_sent = ground.begin(ONE_ONE, Plan(), bytes(MAX_MESSAGE_BYTES + 1))
        errors = [
            await refusal(MANY_ONE, request_too_long),
            await refusal(ONE_MANY, reply_too_long),
            await refusal(ONE_ONE, never_sent),
        ]

        assert [each.code() for each in errors] == [Code.RESOURCE_EXHAUSTED] * 3
        assert all("larger than max" in (each.details() or "") for each in errors)
        assert await ground.answers()
        assert ground.service.num_open == 1
        assert ground.proxy.num_accepted == num_connections
        beside.cancel()
        await eventually(ground.is_at_rest)

"""What every service may rely on, whichever way its calls go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from services.runtime.channels import MAX_MESSAGE_BYTES
from services.runtime.telemetry import TRACEPARENT, TraceContext
from tests.runtime.waiting import eventually
from tests.transports.ways import KINDS, Kind, Way, open_way, payload

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATIENCE_S = 20.0


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=KINDS, ids=[kind.name for kind in KINDS]
)
async def way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Way]:
    kind: Kind = request.param
    folder: Path = tmp_path_factory.mktemp("way")
    async with asyncio.timeout(170), open_way(kind, folder, relayed=True) as opened:
        yield opened


async def code_of(call: Any) -> grpc.StatusCode:
    """How it ended; fails when it does not."""
    async with asyncio.timeout(PATIENCE_S):
        code = await call.code()
        assert isinstance(code, grpc.StatusCode)
        return code


async def read_all(call: Any) -> list[bytes]:
    async with asyncio.timeout(PATIENCE_S):
        return [message async for message in call]


async def test_all_four_shapes_carry_their_messages(way: Way) -> None:
    sent = [payload(number, 1000 * number) for number in range(5)]

    assert await read_all(way.many(5, 100)) == [payload(number, 100) for number in range(5)]
    assert int(await way.count(iter(sent))) == sum(map(len, sent))
    echo = way.echo()
    for message in sent:
        await echo.write(message)
        assert await echo.read() == message
    await echo.done_writing()
    assert await echo.read() is grpc.aio.EOF
    assert json.loads(await way.tell())["remaining_s"] is None
    await way.idle()


async def test_metadata_and_trace_arrive_unchanged_both_ways(way: Way) -> None:
    trace = TraceContext.new().child(sampled=True)
    binary = bytes(range(256))
    metadata = (*trace.metadata(), ("plain", "a b"), ("twice", "1"), ("twice", "2"))
    call = way.tell(binary, metadata=(*metadata, ("raw-bin", binary)))
    told = [tuple(pair) for pair in json.loads(await call)["metadata"]]

    for pair in metadata:
        assert pair in told
    assert ("raw-bin", binary.hex()) in told
    assert dict(told)[TRACEPARENT] == trace.metadata()[0][1]
    assert ("told-bin", binary) in list(await call.trailing_metadata())


async def test_a_deadline_is_told_and_ends_the_call_at_both_ends(way: Way) -> None:
    remaining_s = json.loads(await way.tell(timeout=30.0))["remaining_s"]
    assert 25.0 < remaining_s <= 30.2  # on the wire it is rounded up

    before = way.service.num_cancelled
    assert await code_of(way.hold(timeout=0.1)) is grpc.StatusCode.DEADLINE_EXCEEDED
    stream = way.many(1000, 10, pause_s=0.01, timeout=0.1)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read_all(stream)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await way.idle()
    await eventually(lambda: way.service.num_cancelled == before + 2)


@pytest.mark.parametrize("num_read", [0, 1, 3, 5])
async def test_a_call_is_cancelled_at_any_point(way: Way, num_read: int) -> None:
    """Before its first message, between two, and behind the last."""
    way.service.has_come.clear()
    before = way.service.num_cancelled
    call = way.many(5, 10, pause_s=0.001, linger_s=1000.0)
    for _ in range(num_read):
        await call.read()
    await way.service.has_come.wait()
    assert way.service.num_running == 1
    call.cancel()
    assert await code_of(call) is grpc.StatusCode.CANCELLED
    await eventually(lambda: way.service.num_cancelled == before + 1)
    await way.idle()


async def test_a_call_is_cancelled_before_its_server_hears_of_it(way: Way) -> None:
    calls = [way.hold() for _ in range(20)]
    for call in calls:
        call.cancel()
    assert {await code_of(call) for call in calls} == {grpc.StatusCode.CANCELLED}
    await way.idle()


async def test_a_call_is_cancelled_while_its_server_writes(way: Way) -> None:
    call = way.many(100_000, 10_000)
    assert await call.read() == payload(0, 10_000)
    await _stands_still(way)
    call.cancel()
    assert await code_of(call) is grpc.StatusCode.CANCELLED
    await way.idle()


async def test_a_task_that_is_cancelled_takes_its_call_along(way: Way) -> None:
    way.service.has_come.clear()

    async def wait_for_it() -> None:
        await way.hold()

    task = asyncio.create_task(wait_for_it())
    await way.service.has_come.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await way.idle()


async def test_who_does_not_read_holds_up_itself_alone(way: Way) -> None:
    """Its server waits, with some messages under way; others go on."""
    slow = way.many(100_000, 10_000)
    assert await slow.read() == payload(0, 10_000)
    num_sent = await _stands_still(way)
    assert num_sent < 3000  # of 100,000
    assert len(await read_all(way.many(300, 1000))) == 300
    assert int(await way.count(payload(0, 1000) for _ in range(300))) == 300_000
    for number in range(1, 500):
        assert await slow.read() == payload(number, 10_000)
    slow.cancel()
    await way.idle()


async def _stands_still(way: Way) -> int:
    """What has been sent when nothing more is."""
    while True:
        num_sent = way.service.num_sent
        await asyncio.sleep(0.15)
        if way.service.num_sent == num_sent:
            return num_sent


async def test_a_message_may_be_large_and_not_too_large(way: Way) -> None:
    """Who sends too much hears it, and the connection lives on."""
    largest = MAX_MESSAGE_BYTES - 64
    assert int(await way.count(iter([payload(1, largest)]))) == largest
    assert await read_all(way.many(1, largest)) == [payload(0, largest)]

    for call in (way.many(1, MAX_MESSAGE_BYTES + 1), way.tell(payload(1, MAX_MESSAGE_BYTES + 1))):
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert json.loads(await way.tell())
    await way.idle()


async def test_a_connection_that_is_reset_ends_its_calls_and_no_later_one(way: Way) -> None:
    for turn in range(3):
        way.service.has_come.clear()
        held, stream, echo = way.hold(), way.many(5, 10, linger_s=1000.0), way.echo()
        await stream.read()
        await echo.write(b"one")
        await echo.read()
        await way.service.has_come.wait()
        way.relay.cut()
        for call in (held, stream, echo):
            assert await code_of(call) is grpc.StatusCode.UNAVAILABLE, turn
        await way.idle()
        assert json.loads(await _again(way))


async def _again(way: Way) -> bytes:
    """Connecting again may take a moment, in which calls fail at once."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            call = way.tell(timeout=PATIENCE_S)
            if (code := await code_of(call)) is grpc.StatusCode.OK:
                answer: bytes = await call
                return answer
            assert code is grpc.StatusCode.UNAVAILABLE
            await asyncio.sleep(0.05)


async def test_a_wrong_method_says_so(way: Way) -> None:
    call = way.method("Nothing", "unary_unary")(b"")
    assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import wrappers_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.core.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    MeshError,
    Overloaded,
    Unavailable,
    Violation,
)
from services.runtime.interceptor import DETAILS_KEY
from services.runtime.server import Context, MeshServer
from tests.runtime.waiting import eventually
from tests.runtime.wires import dial

Text = wrappers_pb2.StringValue
SERVICE = "test.Echo"


class Echo:
    """A service with one method of each kind; a test says what they do."""

    def __init__(self, act: Callable[[str], Awaitable[str]]) -> None:
        self.act = act

    async def one_to_one(self, request: Text, context: Context) -> Text:
        return Text(value=await self.act(request.value))

    async def one_to_many(self, request: Text, context: Context) -> AsyncIterator[Text]:
        for part in request.value.split(","):
            yield Text(value=await self.act(part))

    async def one_to_many_by_writing(self, request: Text, context: Context) -> None:
        for part in request.value.split(","):
            await context.write(Text(value=await self.act(part)))

    async def many_to_one(self, requests: AsyncIterator[Text], context: Context) -> Text:
        return Text(value=",".join([await self.act(request.value) async for request in requests]))

    async def many_to_many(
        self, requests: AsyncIterator[Text], context: Context
    ) -> AsyncIterator[Text]:
        async for request in requests:
            yield Text(value=await self.act(request.value))

    async def many_to_many_by_writing(
        self, requests: AsyncIterator[Text], context: Context
    ) -> None:
        async for request in requests:
            await context.write(Text(value=await self.act(request.value)))

    async def raw(self, request: Text, context: Context) -> AsyncIterator[bytes]:
        yield Text(value=await self.act(request.value)).SerializeToString()

    def handler(self) -> grpc.GenericRpcHandler:
        text: dict[str, Any] = {
            "request_deserializer": Text.FromString,
            "response_serializer": Text.SerializeToString,
        }
        one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        from_many, both = (
            grpc.stream_unary_rpc_method_handler,
            grpc.stream_stream_rpc_method_handler,
        )
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "one_to_one": one(self.one_to_one, **text),
                "one_to_many": many(self.one_to_many, **text),
                "one_to_many_by_writing": many(self.one_to_many_by_writing, **text),
                "many_to_one": from_many(self.many_to_one, **text),
                "many_to_many": both(self.many_to_many, **text),
                "many_to_many_by_writing": both(self.many_to_many_by_writing, **text),
                "raw": many(self.raw, request_deserializer=Text.FromString),
            },
        )


METHODS = [
    "one_to_one",
    "one_to_many",
    "one_to_many_by_writing",
    "many_to_one",
    "many_to_many",
    "many_to_many_by_writing",
    "raw",
]


@contextlib.asynccontextmanager
async def serving(act: Callable[[str], Awaitable[str]]) -> AsyncIterator[Any]:
    server = MeshServer("127.0.0.1:0", service_names=[SERVICE])
    server.server.add_generic_rpc_handlers([Echo(act).handler()])
    async with server, dial(server.address) as channel:
        yield channel


async def call(channel: Any, method: str, *requests: bytes) -> list[str]:
    """Everything that the method answers."""
    path = f"/{SERVICE}/{method}"
    parse = Text.FromString

    async def stream() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    if method == "one_to_one":
        one = channel.unary_unary(path, response_deserializer=parse)
        return [(await one(requests[0])).value]
    if method == "many_to_one":
        from_many = channel.stream_unary(path, response_deserializer=parse)
        return [(await from_many(stream())).value]
    if method.startswith("many_to_many"):
        both = channel.stream_stream(path, response_deserializer=parse)
        return [response.value async for response in both(stream())]
    many = channel.unary_stream(path, response_deserializer=parse)
    return [response.value async for response in many(requests[0])]


def encoded(text: str) -> bytes:
    return Text(value=text).SerializeToString()


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Message]:
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.message == error.details()
    found: dict[str, Message] = {}
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        assert packed.Unpack(found[name])
    return found


async def upper(text: str) -> str:
    return text.upper()


@pytest.mark.parametrize("method", METHODS)
async def test_answers_pass_through(method: str) -> None:
    async with serving(upper) as channel:
        answers = await call(channel, method, encoded("hello"))

    assert answers == ["HELLO"]


@pytest.mark.parametrize("method", METHODS)
async def test_an_invalid_argument_carries_its_violations(method: str) -> None:
    async def refuse(text: str) -> str:
        raise InvalidArgument([Violation("a.b", "must be small"), Violation("c", "must exist")])

    async with serving(refuse) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, encoded("hello"))

    details = details_of(caught.value)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "a.b: must be small; c: must exist"
    info = details["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "firsttoken")
    bad = details["BadRequest"]
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert [(found.field, found.description) for found in bad.field_violations] == [
        ("a.b", "must be small"),
        ("c", "must exist"),
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", reason="QUEUE_FULL", retry_delay_s=1.5), "RESOURCE_EXHAUSTED"),
        (Unavailable("away", reason="NO_WORKER"), "UNAVAILABLE"),
        (Conflict("changed", reason="GENERATION_CHANGED"), "ABORTED"),
        (DeadlineExceeded("late", reason="LATE"), "DEADLINE_EXCEEDED"),
        (MeshError("broken"), "INTERNAL"),
    ],
)
async def test_each_error_has_its_code_and_details(error: MeshError, code: str) -> None:
    async def fail(text: str) -> str:
        raise error

    async with serving(fail) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "one_to_one", encoded("hello"))

    details = details_of(caught.value)
    assert caught.value.code().name == code
    assert caught.value.details() == error.message
    info = details["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert info.reason == error.reason
    if error.retry_delay_s is None:
        assert "RetryInfo" not in details
    else:
        retry = details["RetryInfo"]
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToTimedelta().total_seconds() == error.retry_delay_s


@pytest.mark.parametrize(
    "violations",
    [
        [Violation("model", "must be another; got " + "g" * 100_000)],
        [Violation("f" * 100_000, "\U0001f600" * 1000)],
        [Violation(f"stop[{index}]", "must be longer") for index in range(5000)],
    ],
    ids=["a long text", "a long field", "many"],
)
async def test_code_and_reason_arrive_however_much_is_wrong(violations: list[Violation]) -> None:
    async def refuse(text: str) -> str:
        raise InvalidArgument(violations, reason="BULKY")

    async with serving(refuse) as downstream:

        async def forward(text: str) -> str:
            return (await call(downstream, "one_to_one", encoded(text)))[0]

        async with serving(forward) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "one_to_many", encoded("hello"))

    details = details_of(caught.value)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    info, bad = details["ErrorInfo"], details["BadRequest"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert info.reason == "BULKY"
    assert bad.field_violations[0].field[:4] == violations[0].field[:4]


@pytest.mark.parametrize("method", METHODS)
async def test_a_defect_is_logged_and_its_text_kept_from_the_caller(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_down(text: str) -> str:
        raise KeyError("the secret")

    async with serving(break_down) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, encoded("hello"))

    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error"
    assert "the secret" in caplog.text
    assert f"/{SERVICE}/{method} failed" in caplog.text


@pytest.mark.parametrize("method", ["one_to_many", "one_to_many_by_writing"])
async def test_what_was_streamed_before_an_error_arrives(method: str) -> None:
    async def fail_at_b(text: str) -> str:
        if text == "b":
            raise Unavailable("gone", reason="GONE")
        return text

    async with serving(fail_at_b) as channel:
        answers = channel.unary_stream(
            f"/{SERVICE}/{method}", response_deserializer=Text.FromString
        )(encoded("a,b"))
        first = await answers.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers.read()

    assert first.value == "a"
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("method", METHODS)
async def test_a_malformed_message_is_an_invalid_argument_naming_the_field(method: str) -> None:
    async with serving(upper) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, method, b"\x0a\x02\xc3\x28")

    bad = details_of(caught.value)["BadRequest"]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert [found.field for found in bad.field_violations] == ["value"]
    assert "UTF-8" in bad.field_violations[0].description


async def test_a_malformed_message_in_a_stream_comes_after_the_sound_ones() -> None:
    seen: list[str] = []

    async def note(text: str) -> str:
        seen.append(text)
        return text

    async with serving(note) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "many_to_many", encoded("a"), b"\x0a\x05")

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert seen == ["a"]


async def test_the_status_of_a_downstream_call_passes_unchanged() -> None:
    async def refuse(text: str) -> str:
        raise Overloaded("full", reason="QUEUE_FULL", retry_delay_s=2)

    async with serving(refuse) as downstream:

        async def forward(text: str) -> str:
            return (await call(downstream, "one_to_one", encoded(text)))[0]

        async with serving(forward) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as direct:
                await call(downstream, "one_to_one", encoded("hello"))
            with pytest.raises(grpc.aio.AioRpcError) as forwarded:
                await call(channel, "one_to_many", encoded("hello"))

    assert forwarded.value.code() is direct.value.code()
    assert forwarded.value.details() == direct.value.details()
    assert details_of(forwarded.value) == details_of(direct.value)
    keys = [key for key, _ in forwarded.value.trailing_metadata()]
    assert keys.count(DETAILS_KEY) == 1


@pytest.mark.parametrize("method", METHODS)
async def test_cancelling_a_call_cancels_its_handler_and_logs_nothing(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[str] = []
    ended: list[str] = []

    async def hold(text: str) -> str:
        held.append(text)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(text)
        return text

    async with serving(hold) as channel:
        calling = asyncio.ensure_future(call(channel, method, encoded("a")))
        await eventually(lambda: held)
        calling.cancel()
        await asyncio.wait({calling})
        await eventually(lambda: ended, "the handler's end")

    assert ended == ["a"]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_an_error_raised_because_the_caller_is_gone_is_not_a_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = asyncio.Event()

    async def hold(text: str) -> str:
        if text == "after":
            return text
        held.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Unavailable("gone", reason="GONE") from None
        return text

    async with serving(hold) as channel:
        calling = asyncio.ensure_future(call(channel, "one_to_many", encoded("a")))
        await held.wait()
        calling.cancel()
        await asyncio.wait({calling})
        answers = await call(channel, "one_to_many", encoded("after"))

    assert answers == ["after"]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_a_slow_consumer_gone_while_the_handler_writes_closes_the_generator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed = asyncio.Event()
    sent = 0

    class Flood(Echo):
        async def one_to_many(self, request: Text, context: Context) -> AsyncIterator[Text]:
            nonlocal sent
            try:
                while True:
                    yield Text(value="x" * 65536)
                    sent += 1
            finally:
                closed.set()

    server = MeshServer("127.0.0.1:0", service_names=[SERVICE])
    server.server.add_generic_rpc_handlers([Flood(upper).handler()])
    async with server, dial(server.address) as channel:
        stream = channel.unary_stream(f"/{SERVICE}/one_to_many")(b"")
        await stream.read()
        await eventually(lambda: sent)
        stream.cancel()
        await asyncio.wait_for(closed.wait(), 30)

    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(upper) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/none")(b"")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

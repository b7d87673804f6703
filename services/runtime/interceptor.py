"""Where errors become gRPC status codes. Nothing else maps them.

MeshError            its status, its message, and google.rpc details: see status.py
AioRpcError          a downstream call's own status, unchanged
malformed message    INVALID_ARGUMENT naming the field
anything else        logged with its traceback, INTERNAL without its text
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from services.core.errors import InvalidArgument, MeshError, Violation
from services.runtime.malformed import find_violation
from services.runtime.status import to_status

DETAILS_KEY = "grpc-status-details-bin"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Any], Any]
MetadataPair: TypeAlias = tuple[str, str | bytes]

logger = logging.getLogger(__name__)


class CallMetadata(Protocol):
    """What a call says beside its messages. A Context is one."""

    def invocation_metadata(self) -> Iterable[MetadataPair] | None: ...

    def set_trailing_metadata(self, trailing_metadata: Sequence[MetadataPair]) -> None: ...


class Malformed(NamedTuple):
    """Stands in for a request that did not parse, until a handler may answer it."""

    violation: Violation


class WrappingInterceptor(ABC, grpc.aio.ServerInterceptor):
    """Serves each method by what `wrap` makes of its handler, once."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    @abstractmethod
    def wrap(self, handler: Handler, method: str) -> Handler: ...

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = handler, self.wrap(handler, method)
        return known[1]


class ErrorInterceptor(WrappingInterceptor):
    """Wraps every handler; response serializers stay as they are.

    A handler with a stream of requests must take them from its iterator, or pass to
    `checked` what `context.read()` gives it: that may be a `Malformed`.
    """

    def wrap(self, handler: Handler, method: str) -> Handler:
        return _wrap(handler, method)


def behaviour_of(handler: Handler) -> Behaviour:
    behaviour = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    assert behaviour is not None
    return behaviour


async def write_all(responses: Any, context: Context) -> None:
    """`responses`: what a handler with a stream of responses returned."""
    if isinstance(responses, Awaitable):  # it calls context.write itself
        await responses
        return
    # grpc would leave an abandoned generator to the garbage collector, and with it
    # whatever the handler holds.
    async with contextlib.aclosing(responses):
        async for response in responses:
            await write(response, context)


async def write(response: Any, context: Context) -> None:
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:
        # The client has gone, and that this call is cancelled is still on its way.
        raise asyncio.CancelledError from error


def _wrap(handler: Handler, method: str) -> Handler:
    check = _CheckedRequests if handler.request_streaming else checked
    serving = {
        "request_deserializer": _tolerant(handler.request_deserializer),
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(
            _one_response(handler.unary_unary, check, method), **serving
        )
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(
            _many_responses(handler.unary_stream, check, method), **serving
        )
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(
            _one_response(handler.stream_unary, check, method), **serving
        )
    assert handler.stream_stream
    return grpc.stream_stream_rpc_method_handler(
        _many_responses(handler.stream_stream, check, method), **serving
    )


def _one_response(behaviour: Behaviour, check: Callable[[Any], Any], method: str) -> Behaviour:
    async def respond(request: Any, context: Context) -> Any:
        try:
            return await behaviour(check(request), context)
        except Exception as error:
            await _abort(error, context, method)

    return respond


def _many_responses(behaviour: Behaviour, check: Callable[[Any], Any], method: str) -> Behaviour:
    async def respond(request: Any, context: Context) -> None:
        try:
            await write_all(behaviour(check(request), context), context)
        except Exception as error:
            await _abort(error, context, method)

    return respond


async def _abort(error: Exception, context: Context, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.AioRpcError):
        details = [pair for pair in error.trailing_metadata() if pair[0] == DETAILS_KEY]
        trailing = (*context.trailing_metadata(), *details)
        await context.abort(error.code(), error.details() or "", trailing)
    if not isinstance(error, MeshError):
        logger.error("%s failed", method, exc_info=error)
        error = MeshError("internal error")
    status = rpc_status.to_status(to_status(error))
    # What the handler has set would be left out otherwise.
    trailing = (*context.trailing_metadata(), *status.trailing_metadata)
    await context.abort(status.code, status.details, trailing)
    raise AssertionError("abort returned")


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """grpc answers UNKNOWN when a deserializer raises, with no handler to prevent it."""
    if deserialize is None:
        return None
    message_class = getattr(deserialize, "__self__", None)
    descriptor = getattr(message_class, "DESCRIPTOR", None)

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            if descriptor is None:
                return Malformed(Violation("", str(error)))
            return Malformed(find_violation(descriptor, data))

    return parse


def checked(request: Any) -> Any:
    """A message that parsed. Raises InvalidArgument for one that did not."""
    if isinstance(request, Malformed):
        raise InvalidArgument([request.violation], reason="MALFORMED_MESSAGE")
    return request


class _CheckedRequests:
    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self._next: Callable[[], Awaitable[Any]] | None = None

    def __aiter__(self) -> _CheckedRequests:
        return self

    async def __anext__(self) -> Any:
        # Not before: gRPC's generator, once made, warns when nobody takes from it.
        if self._next is None:
            self._next = aiter(self._requests).__anext__
        try:
            request = await self._next()
        except StopAsyncIteration:
            # gRPC ends the requests of a cancelled call too, and cancels a moment later: what
            # was cut off is not to be taken for the whole.
            await asyncio.sleep(0)
            raise
        return checked(request)

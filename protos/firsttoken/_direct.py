"""An answer past the router: planned there, fetched from the worker.

Whatever does not work on that way goes through the router instead, from wherever it was:
whoever reads the answer sees the same chunks, once, and one ledger.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, Protocol, TypeAlias

import grpc

from firsttoken._errors import told_ledger, with_ledger
from firsttoken._ledger import SEGMENTS, spend
from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc

Response: TypeAlias = inference_pb2.GenerateResponse
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, Response]"
    " | grpc.aio.UnaryStreamCall[direct_pb2.GenerateRequest, Response]"
)
PlanCall: TypeAlias = (
    "grpc.aio.UnaryUnaryCall[inference_pb2.PlanRequest, inference_pb2.PlanResponse]"
)

FetchMethod: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[direct_pb2.GenerateRequest, Response]"

METHOD = "/firsttoken.direct.v1.DirectService/Generate"
# What a connection to a worker may take; it is on the way to the first token.
CONNECT_TIMEOUT_S = 0.25
# After a plan that could not be carried out, requests go through the router for so long:
# first, and at most.
RELUCTANCE_S = (1.0, 300.0)
# The worker is not there, stops, or does not take the ticket, as when clocks differ.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_NOT_TAKEN = (
    *_LOST,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)
# The router plans nothing for this caller, or is of an older version.
_NOT_PLANNED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


class WorkerChannels(Protocol):
    def get(self, address: str, server_name: str) -> grpc.aio.Channel | None:
        """To a worker's port for callers; None: not in a way that is as safe as to the router."""
        ...


class Reluctance:
    """Whether to plan: not for a while after that came to nothing, ever longer."""

    def __init__(self) -> None:
        self._for_s = RELUCTANCE_S[0]
        self._until_s = 0.0

    @property
    def may_plan(self) -> bool:
        return time.monotonic() >= self._until_s

    def failed(self) -> None:
        if self.may_plan:  # one of several that were under way
            self._until_s = time.monotonic() + self._for_s
            self._for_s = min(2 * self._for_s, RELUCTANCE_S[1])

    def worked(self) -> None:
        self._for_s = RELUCTANCE_S[0]


class Ways(NamedTuple):
    """How an answer may come."""

    router: grpc.aio.Channel
    workers: WorkerChannels
    reluctance: Reluctance


class _FirstToken(NamedTuple):
    """`call`: which one gave it. `told`: what a worker said of it at once."""

    call: object
    seen_s: float
    total_s: float
    told: common_pb2.Ledger


class DirectCall:
    """One answer, under way from the moment that this is made. `read` and `cancel` as grpc.aio's
    own calls have them.

    The ledger in `finished`, or in the trailing metadata of an error, counts from here.
    """

    def __init__(
        self,
        ways: Ways,
        request: inference_pb2.GenerateRequest,
        metadata: Metadata,
        timeout_s: float | None,
    ) -> None:
        self._ways = ways
        self._request = request
        self._metadata = metadata
        self._started_s = time.monotonic()
        self._deadline_s = None if timeout_s is None else self._started_s + timeout_s
        self._is_cancelled = False
        self._planned = inference_pb2.PlanResponse()
        self._plan_call: PlanCall | None = None
        # At the worker, or at the router.
        self._call: Call | None = None
        self._is_fetching = False
        # When that was opened, and where the time went before, while there is no token.
        self._called_s = 0.0
        self._before = common_pb2.Ledger()
        self._first: _FirstToken | None = None
        # Of the answer, what a worker gave that may still be lost.
        self._answer_ids: list[bytes] = []
        self._num_characters = 0
        self._beginning = asyncio.ensure_future(self._begin())
        self._beginning.add_done_callback(_look_at)

    def cancel(self) -> None:
        """May be called twice, and after the end."""
        self._is_cancelled = True
        self._beginning.cancel()
        for call in (self._plan_call, self._call):
            if call is not None:
                call.cancel()

    async def read(self) -> Response | None:
        """None at the end of the stream. Raises AioRpcError."""
        call = self._call or await self._beginning
        try:
            response = await _next(call)
        except grpc.aio.AioRpcError as error:
            if not self._may_resume(error):
                raise self._with_ledger(error) from None
            response = await self._next_of_router(self._resume())
        if response is not None:
            self._note(response)
        return response

    async def _begin(self) -> Call:
        """Plan, and call the worker. If that cannot be, call the router."""
        try:
            await self._plan()
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NOT_PLANNED:
                raise
            return self._give_up(self._request)
        spend(self._before, self._planned.ledger, seen_s=time.monotonic() - self._started_s)
        planned_s = time.monotonic()
        channel = await self._connect()
        if channel is None:
            return self._resume()
        # As it is where a call connects by itself.
        self._before.transfer_ms += (time.monotonic() - planned_s) * 1e3
        return self._fetch(channel)

    async def _plan(self) -> None:
        self._check_cancelled()
        stub = inference_pb2_grpc.InferenceServiceStub(self._ways.router)
        self._plan_call = stub.Plan(
            inference_pb2.PlanRequest(request=self._request),
            timeout=self._remaining_s(),
            metadata=self._metadata,
        )
        self._planned = await self._plan_call

    async def _connect(self) -> grpc.aio.Channel | None:
        self._check_cancelled()
        channel = self._ways.workers.get(self._planned.address, self._planned.server_name)
        if channel is None:
            return None
        state = channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        return None  # refused: it would be tried again, later
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            return None
        return channel

    def _fetch(self, channel: grpc.aio.Channel) -> Call:
        self._check_cancelled()
        fetch: FetchMethod = channel.unary_stream(
            METHOD,
            request_serializer=direct_pb2.GenerateRequest.SerializeToString,
            response_deserializer=Response.FromString,
        )
        planned = self._planned
        pairs = (("traceparent", planned.traceparent), ("tracestate", planned.tracestate))
        self._is_fetching = True
        self._called_s = time.monotonic()
        call = self._call = fetch(
            direct_pb2.GenerateRequest(call=planned.call, ticket=planned.ticket),
            timeout=self._remaining_s(),
            metadata=tuple(pair for pair in pairs if pair[1]),
        )
        return call

    def _may_resume(self, error: grpc.aio.AioRpcError) -> bool:
        lost = _NOT_TAKEN if self._first is None else _LOST
        return self._is_fetching and error.code() in lost and not self._is_cancelled

    def _resume(self) -> Call:
        """Through the router, behind what is here of the answer."""
        resumption = inference_pb2.Resumption(
            call=self._planned.call,
            ticket=self._planned.ticket,
            answer_ids=b"".join(self._answer_ids),
            answer_characters=self._num_characters,
        )
        return self._give_up(inference_pb2.GenerateRequest(resumption=resumption))

    def _give_up(self, request: inference_pb2.GenerateRequest) -> Call:
        """What was tried until now is time on the way to a worker that answers."""
        self._check_cancelled()
        self._ways.reluctance.failed()
        if self._call is not None:
            self._call.cancel()
        self._is_fetching = False
        self._called_s = time.monotonic()
        if self._first is None:
            spent_ms = sum(getattr(self._before, f"{name}_ms") for name in SEGMENTS)
            self._before.route_ms += (self._called_s - self._started_s) * 1e3 - spent_ms
        stub = inference_pb2_grpc.InferenceServiceStub(self._ways.router)
        self._call = stub.Generate(request, timeout=self._remaining_s(), metadata=self._metadata)
        return self._call

    async def _next_of_router(self, call: Call) -> Response | None:
        try:
            return await _next(call)
        except grpc.aio.AioRpcError as error:
            raise self._with_ledger(error) from None

    def _note(self, response: Response) -> None:
        chunk, is_finished = response.chunk, response.HasField("finished")
        if self._first is None and (is_finished or chunk.token_ids):
            now_s = time.monotonic()
            self._first = _FirstToken(
                self._call, now_s - self._called_s, now_s - self._started_s, chunk.ledger
            )
        if is_finished:
            self._finish(response.finished)
        elif self._is_fetching:
            self._answer_ids.append(chunk.token_ids)
            self._num_characters += len(chunk.text)

    def _finish(self, finished: common_pb2.Finished) -> None:
        first = self._first
        assert first is not None
        told = finished.ledger if first.call is self._call else first.told
        ledger = self._before
        spend(ledger, told, seen_s=first.seen_s)
        ledger.total_ms = first.total_s * 1e3
        finished.ledger.CopyFrom(ledger)
        if self._is_fetching:
            self._ways.reluctance.worked()
            finished.MergeFrom(self._planned.finished)
            self._is_fetching = False  # its status is all that is left

    def _with_ledger(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Up to the first token, or to the failure where there was none."""
        now_s = time.monotonic()
        if self._first is not None:
            _, seen_s, total_s, told = self._first
        elif (failed := told_ledger(error)) is not None:
            seen_s, total_s, told = now_s - self._called_s, now_s - self._started_s, failed
        else:
            return error
        spend(self._before, told, seen_s=seen_s)
        self._before.total_ms = total_s * 1e3
        return with_ledger(error, self._before)

    def _remaining_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError


def _look_at(beginning: asyncio.Future[Call]) -> None:
    """Nobody may ever ask what became of it."""
    if not beginning.cancelled():
        beginning.exception()


async def _next(call: Call) -> Response | None:
    response = await call.read()
    return response if isinstance(response, Response) else None

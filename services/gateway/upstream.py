"""From the gateway to a router: which one, and one answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import grpc

from firsttoken._direct import DirectCall, Reluctance, Ways
from firsttoken._errors import to_mesh_error
from firsttoken._workers import WorkerChannels
from firsttoken.client import MeshError
from firsttoken.control.v1 import control_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from services.gateway.errors import unavailable
from services.runtime.channels import Channels
from services.runtime.delays import inject

Response: TypeAlias = inference_pb2.GenerateResponse
Call: TypeAlias = "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, Response] | DirectCall"

# A router that is not there, or stops.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# How long an answer that is whole waits for its status: a router may stall between the two.
STATUS_PATIENCE_S = 1.0


class Members(NamedTuple):
    """Who is ready."""

    # Ids by address.
    routers: Mapping[str, str]
    num_workers: int
    # What every one of them can hold, as the router has it; 0 while there is none.
    max_context_tokens: int


def read_members(members: Iterable[control_pb2.Member], model: str) -> Members:
    """The routers, and the workers of `model` that answer."""
    routers, contexts = {}, []
    for member in members:
        if member.state != control_pb2.MEMBER_STATE_READY:
            continue
        if member.role == control_pb2.MEMBER_ROLE_ROUTER:
            routers[member.address] = member.id
        elif (
            member.role == control_pb2.MEMBER_ROLE_WORKER
            and member.model == model
            and member.worker.role != control_pb2.WORKER_ROLE_PREFILL
        ):
            contexts.append(member.worker.max_context_tokens)
    return Members(routers, len(contexts), min(contexts, default=0))


class Routers:
    """The ready ones, in turn, and the calls that are open at them."""

    def __init__(self, channels: Channels, workers: WorkerChannels) -> None:
        self._channels = channels
        self._workers = workers
        self._reluctance = Reluctance()
        self._ids: Mapping[str, str] = {}
        self._turn = itertools.count()
        self._calls: Counter[str] = Counter()

    @property
    def num_calls(self) -> int:
        return self._calls.total()

    def update(self, ids: Mapping[str, str]) -> None:
        """A successor at the same address is met afresh."""
        gone = [address for address, id in self._ids.items() if ids.get(address) != id]
        self._ids = ids
        for address in gone:
            # A router that drains still answers what it has.
            if not self._calls[address]:
                self._channels.drop(address)

    def in_turn(self) -> list[str]:
        """All of them, the next one first."""
        addresses = list(self._ids)
        if not addresses:
            return []
        first = next(self._turn) % len(addresses)
        return [*addresses[first:], *addresses[:first]]

    def open(
        self,
        address: str,
        request: inference_pb2.GenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
        *,
        direct: bool,
    ) -> Call:
        """Release it in the end. `direct`: past the router, if the router plans it so."""
        call: Call
        channel = self._channels.get(address)
        if direct and self._reluctance.may_plan:
            ways = Ways(channel, self._workers, self._reluctance)
            call = DirectCall(ways, request, metadata, timeout_s)
        else:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request, timeout=timeout_s, metadata=metadata)
        self._calls[address] += 1
        return call

    def release(self, address: str, call: Call) -> None:
        call.cancel()
        self._calls[address] -= 1
        if not self._calls[address]:
            del self._calls[address]
            if address not in self._ids:
                self._channels.drop(address)


class MeshAnswer:
    """One answer. Close it in the end, whatever happened: that frees what it holds.

    A router that cannot be reached is passed over for the next one, until the first message
    has come. `read` raises MeshError, and ApiError while there is no router.
    """

    def __init__(
        self,
        routers: Routers,
        request: inference_pb2.GenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        *,
        timeout_s: float,
        direct: bool = False,
        delay_ms: float = 0.0,
    ) -> None:
        self._routers = routers
        self._direct = direct
        self._delay_ms = delay_ms
        self._request = request
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._call: Call | None = None
        self._address = ""
        # When the last call was opened, and when the first message came.
        self.called_s = 0.0
        self.first_message_s = 0.0
        # With which it broke off, once there was a first message.
        self.failure: MeshError | None = None

    async def read(self) -> Response:
        """The message after which nothing comes is `finished`; its call has ended by then, unless
        its router is stuck.
        """
        if self._call is None:
            response = await self._first()
        else:
            response = await self._next(self._call)
        if response is None:
            raise MeshError(grpc.StatusCode.UNKNOWN, "the stream ended before the answer")
        if response.HasField("finished"):
            # Until its status is here, the router counts the request among those that run:
            # a client that asked again at once could be one more than its tenant may have.
            assert self._call is not None
            with contextlib.suppress(MeshError, TimeoutError):
                async with asyncio.timeout(STATUS_PATIENCE_S):
                    await _read(self._call)
        return response

    def close(self) -> None:
        """Ends the call where it is, unless it has ended. May be called twice."""
        call, self._call = self._call, None
        if call is not None:
            self._routers.release(self._address, call)

    async def _first(self) -> Response | None:
        deadline_s = time.monotonic() + self._timeout_s
        error: MeshError | None = None
        for address in self._routers.in_turn():
            self.close()
            self._address = address
            self.called_s = time.monotonic()
            await inject(self._delay_ms)
            self._call = self._routers.open(
                *(address, self._request, self._metadata, deadline_s - self.called_s),
                direct=self._direct,
            )
            try:
                response = await _read(self._call, called_s=self.called_s)
            except MeshError as failure:
                # One that says why is there, and another one would say the same.
                if not _says_nothing(failure):
                    raise
                error = failure
            else:
                self.first_message_s = time.monotonic()
                return response
        if error is None:
            raise unavailable("there is no router in the mesh", code="no_router")
        raise unavailable(f"no router can be reached: {error.message}", code="router_unavailable")

    async def _next(self, call: Call) -> Response | None:
        try:
            return await _read(call, called_s=self.called_s, until_s=self.first_message_s)
        except MeshError as failure:
            if not _says_nothing(failure):
                self.failure = failure
                raise
            message = f"the router was lost in the middle of the answer: {failure.message}"
            raise MeshError(failure.code, message, reason="ROUTER_LOST") from None


def _says_nothing(failure: MeshError) -> bool:
    """It is gRPC's own: nobody is there to give a reason."""
    return failure.code in _GONE and not failure.reason


async def merge(answers: Sequence[MeshAnswer]) -> AsyncGenerator[tuple[int, Response], None]:
    """Each message with its answer's index, as they come. Only the next of each is asked for,
    and only once the one before was taken: who does not read holds up only itself.
    """
    if len(answers) == 1:
        [answer] = answers
        while True:
            response = await answer.read()
            yield 0, response
            if response.HasField("finished"):
                return
    reads = {asyncio.ensure_future(answer.read()): index for index, answer in enumerate(answers)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in sorted(done, key=reads.__getitem__):
                index = reads.pop(read)
                response = read.result()
                yield index, response
                if not response.HasField("finished"):
                    reads[asyncio.ensure_future(answers[index].read())] = index
    finally:
        for read in reads:
            read.cancel()
        if reads:
            await asyncio.wait(reads)
            for read in reads:
                if not read.cancelled():
                    read.exception()  # nobody else asks for it


async def _read(
    call: Call, *, called_s: float | None = None, until_s: float | None = None
) -> Response | None:
    """A call that fails took from `called_s` to `until_s`, the first message, or until now."""
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        end_s = time.monotonic() if until_s is None else until_s
        elapsed_s = 0.0 if called_s is None else end_s - called_s
        raise to_mesh_error(error, elapsed_ms=elapsed_s * 1e3) from None
    except asyncio.CancelledError:
        # grpc.aio raises this also where the channel was closed under the call. Only
        # where this task is being cancelled is it meant for the task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise MeshError(grpc.StatusCode.CANCELLED, "the channel was closed") from None
    return response if isinstance(response, Response) else None

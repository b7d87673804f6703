"""Follows what becomes of plans: one stream to each worker that callers may reach."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

import grpc

from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from router.peers import PeerLost, answer_of
from router.plans import Plans
from router.subscription import Subscription
from services.runtime.channels import MAX_MESSAGE_BYTES, Channels
from services.runtime.tasks import end_tasks

FollowCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[worker_pb2.FollowPlansRequest, worker_pb2.FollowPlansResponse]"
)

# Of calls in one message, which has a limit.
MAX_OUTBOX_BYTES = MAX_MESSAGE_BYTES // 2


class Direct(NamedTuple):
    """A worker that callers may reach: its port for the mesh, and the one for them."""

    id: str
    address: str
    direct_address: str


class Following:
    """An async context manager."""

    def __init__(self, plans: Plans, channels: Channels, router_id: str) -> None:
        self._plans = plans
        self._channels = channels
        self.router_id = router_id
        # By worker.
        self._streams: dict[str, _Stream] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """May be called twice."""
        self.follow(())
        await end_tasks(self._ending)

    def follow(self, workers: Iterable[Direct]) -> None:
        """These, and no others from now on. Call it before their channels are dropped."""
        wanted = {worker.id: worker for worker in workers}
        for stream in [*self._streams.values()]:
            if wanted.get(stream.worker.id) != stream.worker:
                del self._streams[stream.worker.id]
                stream.stop(self._ending)
                self._plans.gone(stream.worker.id)
        for worker in wanted.values():
            if worker.id not in self._streams:
                stream = self._streams[worker.id] = _Stream(self, worker)
                stream.start()

    def begin(self, worker_id: str, start: worker_pb2.HeadStart) -> None:
        """Tell the worker of a plan before its client does."""
        if (stream := self._streams.get(worker_id)) is not None:
            stream.begin(start)

    def withdraw(self, worker_id: str, plan_id: bytes) -> None:
        """Its client goes another way."""
        if (stream := self._streams.get(worker_id)) is not None:
            stream.withdraw(plan_id)

    def open(self, worker: Direct) -> FollowCall:
        return worker_pb2_grpc.WorkerServiceStub(self._channels.get(worker.address)).FollowPlans()

    def hear(self, worker: Direct, message: worker_pb2.FollowPlansResponse) -> None:
        self._plans.hear(worker.id, worker.direct_address, message)

    def deaf(self, worker: Direct) -> None:
        if worker.id in self._streams:
            self._plans.deaf(worker.id)


class _Stream(Subscription):
    """To and from one worker."""

    def __init__(self, following: Following, worker: Direct) -> None:
        super().__init__(worker.id, "plans")
        self.worker = worker
        self._following = following
        # What is to be told next, and that there is some.
        self._outbox = worker_pb2.FollowPlansRequest()
        self._outbox_bytes = 0
        self._some = asyncio.Event()

    def begin(self, start: worker_pb2.HeadStart) -> None:
        """A head start is a favour: none where too much waits to be told."""
        self._outbox_bytes += len(start.call)
        if self._outbox_bytes <= MAX_OUTBOX_BYTES:
            self._outbox.head_starts.append(start)
            self._some.set()

    def withdraw(self, plan_id: bytes) -> None:
        self._outbox.withdrawn.append(plan_id)
        self._some.set()

    def _lost(self) -> None:
        self._following.deaf(self.worker)

    async def _listen(self) -> None:
        call = self._call = self._following.open(self.worker)
        # What was planned before is too old to have a head start.
        self._outbox = worker_pb2.FollowPlansRequest(router_id=self._following.router_id)
        self._outbox_bytes = 0
        self._some.set()
        telling = asyncio.create_task(self._tell(call), name=f"tell {self.worker.id} of plans")
        try:
            while (message := await answer_of(call.read())) is not grpc.aio.EOF:
                assert isinstance(message, worker_pb2.FollowPlansResponse)
                self._following.hear(self.worker, message)
        finally:
            telling.cancel()
        raise PeerLost("it has ended the stream")

    async def _tell(self, call: FollowCall) -> None:
        """Until the call has ended, of which who reads it hears."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._some.wait()
                self._some.clear()
                message, self._outbox = self._outbox, worker_pb2.FollowPlansRequest()
                self._outbox_bytes = 0
                await call.write(message)

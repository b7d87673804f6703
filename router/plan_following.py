"""Follows what becomes of plans: one stream to each worker that callers may reach."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

import grpc

from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from router.peers import PeerLost, answer_of
from router.plans import Plans
from services.runtime.channels import Channels
from services.runtime.logs import event
from services.runtime.tasks import end_tasks

FollowCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[worker_pb2.FollowPlansRequest, worker_pb2.FollowPlansResponse]"
)

BACKOFF_S = (0.05, 2.0)  # first, longest

logger = logging.getLogger(__name__)


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
                stream.stop()
                self._ending.add(stream.task)
                stream.task.add_done_callback(self._ending.discard)
                self._plans.gone(stream.worker.id)
        for worker in wanted.values():
            if worker.id not in self._streams:
                self._streams[worker.id] = _Stream(self, worker)

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


class _Stream:
    """Opened again for as long as its worker is followed."""

    def __init__(self, following: Following, worker: Direct) -> None:
        self.worker = worker
        self._following = following
        self._call: FollowCall | None = None
        self._problem = ""
        # What is to be told next, and that there is some.
        self._outbox = worker_pb2.FollowPlansRequest()
        self._some = asyncio.Event()
        self.task = asyncio.create_task(self._follow(), name=f"plans at {worker.id}")

    def begin(self, start: worker_pb2.HeadStart) -> None:
        self._outbox.head_starts.append(start)
        self._some.set()

    def withdraw(self, plan_id: bytes) -> None:
        self._outbox.withdrawn.append(plan_id)
        self._some.set()

    def stop(self) -> None:
        """Its call ends now: the channel may be closed next."""
        self.task.cancel()
        if self._call is not None:
            self._call.cancel()

    async def _follow(self) -> None:
        clock = asyncio.get_running_loop().time
        backoff_s, settled_s = BACKOFF_S
        while True:
            opened_s = clock()
            try:
                await self._listen()
            except PeerLost as lost:
                self._note(str(lost))
            except grpc.aio.AioRpcError as error:
                self._note(f"{error.code().name}: {error.details()}")
            except Exception:  # a defect: better to ask again than to be deaf from now on
                logger.exception("following the plans at %s failed", self.worker.id)
            finally:
                self._following.deaf(self.worker)
            if clock() - opened_s > settled_s:
                backoff_s = BACKOFF_S[0]
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, settled_s)

    async def _listen(self) -> None:
        call = self._call = self._following.open(self.worker)
        # What was planned before is too old to have a head start.
        self._outbox = worker_pb2.FollowPlansRequest(router_id=self._following.router_id)
        self._some.set()
        telling = asyncio.create_task(self._tell(call), name=f"tell {self.worker.id} of plans")
        try:
            while True:
                message = await answer_of(call.read())
                if not isinstance(message, worker_pb2.FollowPlansResponse):
                    return
                self._following.hear(self.worker, message)
        finally:
            telling.cancel()
            call.cancel()
            self._call = None

    async def _tell(self, call: FollowCall) -> None:
        """Until the call has ended, of which who reads it hears."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._some.wait()
                self._some.clear()
                message, self._outbox = self._outbox, worker_pb2.FollowPlansRequest()
                await call.write(message)

    def _note(self, problem: str) -> None:
        """Said once for each problem: it may go on for long."""
        if problem != self._problem:
            self._problem = problem
            event(
                logger, logging.DEBUG, "plans not followed", worker=self.worker.id, reason=problem
            )

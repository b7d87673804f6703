"""Follows what becomes of plans: one stream to each worker that callers may reach."""

from __future__ import annotations

import asyncio
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
    "grpc.aio.UnaryStreamCall[worker_pb2.FollowPlansRequest, worker_pb2.FollowPlansResponse]"
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
        self._router_id = router_id
        self._streams: dict[Direct, _Stream] = {}
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
        wanted = dict.fromkeys(workers)
        for worker in self._streams.keys() - wanted.keys():
            stream = self._streams.pop(worker)
            stream.stop()
            self._ending.add(stream.task)
            stream.task.add_done_callback(self._ending.discard)
            self._plans.gone(worker.id)
        for worker in wanted:
            if worker not in self._streams:
                self._streams[worker] = _Stream(self, worker)

    def open(self, worker: Direct) -> FollowCall:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(worker.address))
        return stub.FollowPlans(worker_pb2.FollowPlansRequest(router_id=self._router_id))

    def hear(self, worker: Direct, message: worker_pb2.FollowPlansResponse) -> None:
        self._plans.hear(worker.id, worker.direct_address, message)

    def deaf(self, worker: Direct) -> None:
        if worker in self._streams:
            self._plans.deaf(worker.id)


class _Stream:
    """Opened again for as long as its worker is followed."""

    def __init__(self, following: Following, worker: Direct) -> None:
        self._following = following
        self._worker = worker
        self._call: FollowCall | None = None
        self._problem = ""
        self.task = asyncio.create_task(self._follow(), name=f"plans at {worker.id}")

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
                logger.exception("following the plans at %s failed", self._worker.id)
            finally:
                self._following.deaf(self._worker)
            if clock() - opened_s > settled_s:
                backoff_s = BACKOFF_S[0]
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, settled_s)

    async def _listen(self) -> None:
        call = self._call = self._following.open(self._worker)
        try:
            while True:
                message = await answer_of(call.read())
                if not isinstance(message, worker_pb2.FollowPlansResponse):
                    return
                self._following.hear(self._worker, message)
        finally:
            call.cancel()
            self._call = None

    def _note(self, problem: str) -> None:
        """Said once for each problem: it may go on for long."""
        if problem != self._problem:
            self._problem = problem
            event(
                logger, logging.DEBUG, "plans not followed", worker=self._worker.id, reason=problem
            )

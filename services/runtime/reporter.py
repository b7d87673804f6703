"""What this process tells the observer: its requests, and how it is itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, TypeAlias

import grpc

from firsttoken.control.v1 import control_pb2
from firsttoken.observer.v1 import observer_pb2, observer_pb2_grpc
from services.core.config import Snapshot
from services.core.ledger import Ledger
from services.core.metrics import Metric, Sample
from services.runtime import hops
from services.runtime.channels import open_channel
from services.runtime.lag import METRICS, LoopWatch
from services.runtime.logs import event
from services.runtime.membership import ControlClient
from services.runtime.pending import Pending
from services.runtime.tasks import end_tasks
from services.runtime.telemetry import Attributes, TraceContext
from services.runtime.tls import Tls

# Rarely: a message costs its sender as much as a hundred hops in it.
INTERVAL_S = 1.0
BACKOFF_S = (0.1, 2.0)  # first, longest
# A stream that lasted for so long was no failure.
LASTING_S = 5.0
CLOSE_TIMEOUT_S = 1.0

ReportCall: TypeAlias = (
    "grpc.aio.StreamUnaryCall[observer_pb2.ReportRequest, observer_pb2.ReportResponse]"
)

logger = logging.getLogger(__name__)


class Watched(NamedTuple):
    metrics: tuple[Metric, ...]
    read: Callable[[], Iterable[Sample]]


class Reporter:
    """An async context manager; entered, it tells the observer of the mesh, if there is one.

    Whoever records something pays for an append, and now and then for writing a batch. What comes
    together is told once a second. An observer that is gone, slow or dead costs requests nothing:
    the oldest is dropped, and counted. Until an observer has been seen, nothing is kept.
    """

    def __init__(self, *, service: str, member_id: str, tls: Tls | None = None) -> None:
        self._sender = observer_pb2.Sender(
            member_id=member_id, service=service, host=socket.gethostname(), pid=os.getpid()
        )
        self._tls = tls
        # There is, or was, somebody to be told, who wants to hear it.
        self.enabled = False
        self._wanted = True
        self._seen = False
        # Of the observer; "" while there is none.
        self._address = ""
        self._members: Sequence[control_pb2.Member] = ()
        self._pending = Pending()
        self._watched: list[Watched] = []
        # Of these, those whose metrics this stream's observer knows.
        self._num_described = 0
        # Something is other than it was: the address, or that it closes.
        self._changed = asyncio.Event()
        self._closing = False
        self._lost = False
        self._loop_watch = LoopWatch()
        self.watch(METRICS, self._loop_watch.read)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Reporter:
        self._task = asyncio.create_task(self._keep_telling(), name="tell the observer")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Tell what is left, as far as CLOSE_TIMEOUT_S lets it. May be called twice."""
        task, self._task = self._task, None
        if task is None:
            return
        self._closing = True
        self._changed.set()
        await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
        await end_tasks([task])
        self.enabled = False

    def follow(self, control: ControlClient) -> None:
        """Whoever is the observer, if it is wanted."""
        control.on_config(self.configure)
        control.on_members(self.update_members)

    def configure(self, snapshot: Snapshot) -> None:
        self._wanted = snapshot.config.observer.enabled
        self._look_for_observer()

    def update_members(self, members: Sequence[control_pb2.Member]) -> None:
        self._members = members
        self._look_for_observer()

    def _look_for_observer(self) -> None:
        """Of several every process chooses the same, for a trace to be in one place."""
        found = [m for m in self._members if m.role == control_pb2.MEMBER_ROLE_OBSERVER]
        self._seen = self._seen or bool(found)
        self.enabled = self._seen and self._wanted and not self._closing
        ready = [m for m in found if m.state == control_pb2.MEMBER_STATE_READY and self._wanted]
        address = min(ready, key=lambda member: member.id).address if ready else ""
        if address != self._address:
            self._address = address
            self._changed.set()

    def watch(self, metrics: Iterable[Metric], read: Callable[[], Iterable[Sample]]) -> None:
        """From now on tell what `read` says, once a second. It is called on the loop."""
        self._watched.append(Watched(tuple(metrics), read))

    def decide(self, context: TraceContext, sample_ratio: float) -> bool:
        """The caller's decision, or else the same one in every process for one trace."""
        if context.sampled is not None:
            return context.sampled
        return int(context.trace_id[16:], 16) < sample_ratio * (1 << 64)

    def record_request(
        self,
        name: str,
        context: TraceContext,
        parent_span_id: str,
        ledger: Ledger,
        attributes: Attributes,
        *,
        error: str = "",
        end_s: float | None = None,
    ) -> None:
        """One request's hop, which has ended.

        `context` is the hop's own span, `parent_span_id` the caller's ("" for none). `ledger`
        times are time.monotonic(); `end_s` defaults to now. Neither ledger nor attributes may
        change any more.
        """
        if not self.enabled:
            return
        ended_s = time.monotonic() if end_s is None else end_s
        self._pending.add_hop(
            hops.Told(name, context, parent_span_id, ledger, attributes, error, ended_s)
        )

    def bubble(self, stage: str, duration_s: float) -> None:
        """An engine had nothing to do while `stage` held work for it."""
        if self.enabled:
            self._pending.add_bubble(stage, duration_s)

    def evicted(self, holder_id: str, prefix_keys: Iterable[bytes]) -> None:
        """A holder has dropped these blocks."""
        if self.enabled:
            self._pending.add_evicted(holder_id, prefix_keys)

    def prompt(self, prompt: observer_pb2.Prompt) -> None:
        """Blocks of a prompt that were not told before."""
        if self.enabled:
            self._pending.add_prompt(prompt)

    @property
    def num_dropped(self) -> int:
        """Hops that could not be told."""
        return self._pending.num_dropped

    async def _keep_telling(self) -> None:
        backoff_s, longest_s = BACKOFF_S
        while True:
            while not self._address and not self._closing:
                self._changed.clear()
                await self._changed.wait()
            if self._address:
                began_s = time.monotonic()
                await self._tell(self._address)
                if time.monotonic() - began_s > LASTING_S:
                    backoff_s = BACKOFF_S[0]
            if self._closing:
                return
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, longest_s)

    async def _tell(self, address: str) -> None:
        """Hold one stream for as long as it lives, and `address` is the observer's."""
        try:
            with self._loop_watch:
                async with open_channel(address, self._tls) as channel:
                    await self._tell_through(channel, address)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "it has ended"
            self._note_lost(address, reason or "")
        except Exception:  # a defect: better to begin again than to be mute from now on
            logger.exception("telling the observer failed")

    async def _tell_through(self, channel: grpc.aio.Channel, address: str) -> None:
        call = observer_pb2_grpc.ObserverServiceStub(channel).Report()
        try:
            await call.write(self._first_message())
            self._lost = False
            await self._tell_what_comes(call, address)
        finally:
            call.cancel()

    async def _tell_what_comes(self, call: ReportCall, address: str) -> None:
        while True:
            await self._pause(INTERVAL_S)
            if self._address != address and not self._closing:
                return
            message = observer_pb2.ReportRequest()
            self._add_samples(message)
            await self._write(call, message)
            while self._pending.has_batches:
                await self._write(call, observer_pb2.ReportRequest())
            if self._closing and not self._pending.has_hops:
                await call.done_writing()
                await call
                return

    async def _write(self, call: ReportCall, message: observer_pb2.ReportRequest) -> None:
        """With all that waits to be told, unless that is nothing."""
        taken = self._pending.move_hops(message)
        self._pending.move_others(message)
        message.num_dropped = self.num_dropped
        if not _says_something(message):
            return
        try:
            await call.write(message)
        except BaseException:
            self._pending.put_back(taken)
            raise

    async def _pause(self, duration_s: float) -> None:
        """Ends early when something changes."""
        if self._closing:
            return
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._changed.wait()

    def _first_message(self) -> observer_pb2.ReportRequest:
        self._num_described = 0
        return observer_pb2.ReportRequest(sender=self._sender)

    def _add_samples(self, message: observer_pb2.ReportRequest) -> None:
        # Some are watched only when the stream has long begun.
        for watched in self._watched[self._num_described :]:
            message.metrics.extend(
                observer_pb2.MetricInfo(**metric._asdict()) for metric in watched.metrics
            )
        self._num_described = len(self._watched)
        for watched in self._watched:
            try:
                for name, value, labels in watched.read():
                    message.samples.add(name=name, value=value, labels=dict(labels))
            except Exception:
                logger.exception("metrics could not be read")

    def _note_lost(self, address: str, reason: str) -> None:
        if not self._lost:
            event(logger, logging.WARNING, "observer lost", observer=address, reason=reason)
        self._lost = True


def _says_something(message: observer_pb2.ReportRequest) -> bool:
    told = message.hops_json, message.samples, message.prompts, message.bubbles, message.evictions
    return any(map(len, told))

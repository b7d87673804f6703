"""The control stream of one process: it announces itself, and is told everything else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, TypeAlias

import grpc

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.core.config import Snapshot, from_json
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.core.tickets import KeyRing
from services.runtime import logs
from services.runtime.channels import open_channel
from services.runtime.logs import event
from services.runtime.probe import explain
from services.runtime.startup import StartupError
from services.runtime.tasks import end_tasks
from services.runtime.tickets import ring_from_proto
from services.runtime.tls import Tls

JoinCall: TypeAlias = "grpc.aio.StreamStreamCall[control_pb2.JoinRequest, control_pb2.JoinResponse]"
Members: TypeAlias = tuple[control_pb2.Member, ...]

START_TIMEOUT_S = 15.0
BACKOFF_S = (0.05, 1.0)  # first, longest
# Time between two reports: a burst of updates becomes one.
REPORT_INTERVAL_S = 0.02
# Of a configuration: a longer one would hold the loop for milliseconds while it is parsed.
MAX_CHARACTERS_ON_LOOP = 1 << 14
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)

logger = logging.getLogger(__name__)


class ControlClient:
    """An async context manager that keeps one Join stream open, through every failure.

    `control_address` may name several replicas, separated by commas: when one
    fails, the next is tried. While none answers, `snapshot` and `members` stay what
    they were last. Every new stream announces the member's state as a whole, so an
    update made while disconnected is never lost.

    The generation may go down: a control that keeps its configuration in memory
    begins again at 1 when it restarts. What is pushed always replaces what was.

    `tls`: what this process shows to the others, and knows them by.

    Entering waits for the first configuration and membership; it raises
    StartupError when none has come within `start_timeout_s`.
    """

    def __init__(
        self,
        control_address: str,
        member: control_pb2.Member,
        *,
        tls: Tls | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.tls = tls
        self._addresses = [part.strip() for part in control_address.split(",") if part.strip()]
        if not self._addresses:
            raise StartupError("no control service given: use --control host:port")
        self._member = control_pb2.Member()
        self._member.CopyFrom(member)
        self._start_timeout_s = start_timeout_s
        self._snapshot: Snapshot | None = None
        self._config_json = ""
        self._members: Members | None = None
        self._changed = asyncio.Event()
        self._informed = asyncio.Event()
        self._on_config: list[Callable[[Snapshot], None]] = []
        self._on_members: list[Callable[[Members], None]] = []
        self._ticket_keys = KeyRing()
        self._lost = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ControlClient:
        self._task = asyncio.create_task(self._stay_joined(), name="control stream")
        informed = asyncio.ensure_future(self._informed.wait())
        try:
            await asyncio.wait(
                {informed, self._task},
                timeout=self._start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._task.done():
                self._task.result()
            if not informed.done():
                raise StartupError(await self._why_not_joined())
        except BaseException:
            await self.close()
            raise
        finally:
            informed.cancel()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave: the stream's end tells the others."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    @property
    def snapshot(self) -> Snapshot:
        assert self._snapshot is not None, "enter the ControlClient first"
        return self._snapshot

    @property
    def members(self) -> Members:
        return self._members or ()

    @property
    def ticket_keys(self) -> KeyRing:
        """None, unless this process is a router or a worker."""
        return self._ticket_keys

    @property
    def member_id(self) -> str:
        return self._member.id

    def update(self, **fields: Any) -> None:
        """Change fields of this process's own Member and report it."""
        updated = control_pb2.Member()
        updated.CopyFrom(self._member)
        for name in fields:
            updated.ClearField(name)  # type: ignore[arg-type]
        updated.MergeFrom(control_pb2.Member(**fields))
        if updated != self._member:
            self._member = updated
            self._changed.set()

    def on_config(self, callback: Callable[[Snapshot], None]) -> None:
        """Called on the loop at each push, and now if there is a configuration already."""
        self._on_config.append(callback)
        if self._snapshot is not None:
            _call(callback, self._snapshot)

    def on_members(self, callback: Callable[[Members], None]) -> None:
        """Called on the loop at each push, and now if there is a membership already."""
        self._on_members.append(callback)
        if self._members is not None:
            _call(callback, self._members)

    async def _stay_joined(self) -> None:
        backoff_s, longest_s = BACKOFF_S
        for attempt in itertools.count(1):
            address = self._addresses[(attempt - 1) % len(self._addresses)]
            if await self._join(address):
                backoff_s = BACKOFF_S[0]
            if attempt % len(self._addresses) == 0:
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, longest_s)

    async def _join(self, address: str) -> bool:
        """Hold one stream for as long as it lives; whether it said anything."""
        heard = False
        try:
            channel = open_channel(address, self.tls)
            async with channel, self._reporting(channel) as responses:
                async for response in responses:
                    if not heard:
                        heard = True
                        self._note_joined(address)
                    await self._receive(response)
            self._note_lost(address, "the stream was ended")
        except grpc.aio.AioRpcError as error:
            refused = error.code() in _REFUSED
            if refused and not self._informed.is_set():
                raise StartupError(
                    f"the control service at {address} refuses this process: {error.details()}"
                ) from error
            self._note_lost(address, f"{error.code().name}: {error.details()}")
        except StartupError:
            raise
        except Exception:  # a defect: better to join again than to be deaf from now on
            logger.exception("the control stream failed")
        return heard

    async def _why_not_joined(self) -> str:
        for address in self._addresses:
            if problem := await explain(address, self.tls):
                return problem
        addresses = ", ".join(self._addresses)
        return f"no control service at {addresses} (tried for {self._start_timeout_s:g} s)"

    @contextlib.asynccontextmanager
    async def _reporting(self, channel: grpc.aio.Channel) -> AsyncIterator[JoinCall]:
        """A stream that is told of this member, now as a whole and then of each change."""
        call = control_pb2_grpc.ControlServiceStub(channel).Join()
        task = asyncio.create_task(self._report(call), name="report to control")
        try:
            yield call
        finally:
            call.cancel()
            await end_tasks([task])

    async def _report(self, call: JoinCall) -> None:
        # A stream that has ended refuses writes; whoever reads it learns why.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                self._changed.clear()
                await call.write(control_pb2.JoinRequest(member=self._member))
                await asyncio.sleep(REPORT_INTERVAL_S)
                await self._changed.wait()

    def _note_joined(self, address: str) -> None:
        self._lost = False
        event(logger, logging.INFO, "joined", control=address)

    def _note_lost(self, address: str, reason: str) -> None:
        if not self._lost:
            event(logger, logging.WARNING, "not joined", control=address, reason=reason)
        self._lost = True

    async def _receive(self, response: control_pb2.JoinResponse) -> None:
        if response.HasField("configuration"):
            await self._configure(response.configuration)
        elif response.HasField("ticket_keys"):
            self._ticket_keys = ring_from_proto(response.ticket_keys)
        elif response.HasField("membership"):
            self._members = tuple(response.membership.members)
            for callback in self._on_members:
                _call(callback, self._members)
        if self._snapshot is not None and self._members is not None:
            self._informed.set()

    async def _configure(self, pushed: control_pb2.Configuration) -> None:
        try:
            parsed = await self._parse(pushed.config_json)
        except (InvalidArgument, ValueError) as error:
            reason = f"generation {pushed.generation} is not valid for this version: {error}"
            if self._snapshot is None:
                raise StartupError(f"the configuration that control gives: {reason}") from error
            event(logger, logging.ERROR, "configuration not taken", reason=reason)
            return
        snapshot = Snapshot(pushed.generation, parsed)
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            logs.follow_level(parsed.telemetry.log_level)
            for callback in self._on_config:
                _call(callback, snapshot)
        self.update(generation=snapshot.generation)

    async def _parse(self, config_json: str) -> MeshConfig:
        if self._snapshot is not None and config_json == self._config_json:
            return self._snapshot.config  # control pushes it again after each reconnection
        if len(config_json) > MAX_CHARACTERS_ON_LOOP:
            parsed = await asyncio.to_thread(from_json, config_json)
        else:
            parsed = from_json(config_json)
        self._config_json = config_json
        return parsed


def _call(callback: Callable[[Any], None], value: Any) -> None:
    try:
        callback(value)
    except Exception:
        logger.exception("a subscriber of the control stream failed")

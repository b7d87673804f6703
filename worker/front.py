"""The worker's front: starts the engine core, feeds it, hands out what it makes.

An engine that dies takes no front with it: requests in flight end with
UNAVAILABLE, and a new core is started.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from services.core import config as mesh_config
from services.core.config import Snapshot
from services.core.errors import Overloaded, Unavailable
from services.core.ledger import Segment
from services.core.settings import MeshConfig
from services.runtime.startup import StartupError
from worker.arena import BlockArena, new_memory
from worker.engines.contract import Bytes, EngineInfo
from worker.front_link import FrontLink
from worker.inbox import Inbox
from worker.link import LinkClosed
from worker.messages import (
    Cancel,
    Command,
    Failed,
    FreeOutbox,
    Ready,
    Settings,
    Source,
    Stage,
    StepReport,
    StoredBlock,
    Submit,
    to_token,
)
from worker.requests import Prompt
from worker.roles import Role
from worker.stream import TokenStream
from worker.watch import EMPTY_LOAD, WatchHub

_log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 5.0
CLOSE_GRACE_S = 3.0


class EngineFront:
    """Owns the core process. Enter it to wait for the engine to be loaded."""

    def __init__(self, config: MeshConfig, *, cores_shared_by: int, role: Role = Role.BOTH) -> None:
        self.hub = WatchHub()
        self._config = config
        self._cores_shared_by = cores_shared_by
        self._role = role
        self._request_ids = itertools.count(1)
        self._streams: dict[int, TokenStream] = {}
        # Requests that the core has not yet let go of: their slot and KV are in use.
        self._held: set[int] = set()
        self._link: FrontLink | None = None
        self._info: EngineInfo | None = None
        self._max_waiting = config.worker.max_waiting
        self._max_unread_tokens = config.worker.max_unread_tokens
        self._settings = _settings(config)
        self._on_core: Callable[[bool], None] = lambda up: None
        self._on_stored: list[Callable[[list[StoredBlock]], None]] = []
        self._on_bubble: Callable[[str, float], None] = lambda stage, duration_s: None
        self._memory_fd = new_memory()
        self._arena: BlockArena | None = None
        self._inbox: Inbox | None = None
        # Slots of the inbox that the core holds now.
        self._staged: set[int] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def info(self) -> EngineInfo:
        """What the engine is; known once entered."""
        if self._info is None:
            raise RuntimeError("the engine has not been loaded yet")
        return self._info

    @property
    def arena(self) -> BlockArena:
        """Memory shared with the core; known once entered, and the same for every core."""
        if self._arena is None:
            raise RuntimeError("the engine has not been loaded yet")
        return self._arena

    @property
    def inbox(self) -> Inbox:
        if self._inbox is None:
            raise RuntimeError("the engine has not been loaded yet")
        return self._inbox

    def inbox_view(self, slot: int, num_tokens: int) -> Bytes:
        """Where the bytes of a block of `num_tokens` go."""
        view: Bytes = self.arena.inbox[slot][: num_tokens * self.info.token_bytes]
        return view

    @property
    def memory_fd(self) -> int:
        return self._memory_fd

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def __aenter__(self) -> Self:
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(loaded), name="engine core")
        try:
            await loaded
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1

    def on_core(self, callback: Callable[[bool], None]) -> None:
        """Called with False when the core dies, and with True when a new one is ready."""
        self._on_core = callback

    def on_stored(self, callback: Callable[[list[StoredBlock]], None]) -> None:
        """Called with the blocks that have entered the pool."""
        self._on_stored.append(callback)

    def on_bubble(self, callback: Callable[[str, float], None]) -> None:
        """Called when the engine had nothing to do: who held work for it, and for how long."""
        self._on_bubble = callback

    def configure(self, snapshot: Snapshot) -> None:
        self._max_waiting = snapshot.config.worker.max_waiting
        self._max_unread_tokens = snapshot.config.worker.max_unread_tokens
        self._settings = _settings(snapshot.config)
        if self._link is not None:
            self._link.send(self._settings)

    @contextmanager
    def submit(
        self,
        prompt: Prompt,
        *,
        source: Source = Source.COMPUTE,
        export_from: int | None = None,
        export_credit: int = 0,
        offer: bool = False,
        before: tuple[tuple[Segment, float], ...] = (),
    ) -> Iterator[TokenStream]:
        """Run one request. Leaving the context ends it, whatever state it is in.

        `source` and what follows: as in `Submit`.
        """
        link = self._link
        if link is None:
            raise Unavailable("the engine core is restarting", reason="ENGINE_RESTARTING")
        if len(self._streams) >= self.info.num_slots + self._max_waiting:
            raise Overloaded(
                f"{len(self._streams)} requests are here already (worker.max_waiting)",
                reason="WORKER_QUEUE_FULL",
                retry_delay_s=1.0,
            )
        request_id = next(self._request_ids)
        stream = TokenStream(request_id, functools.partial(self._tell, link))
        self._streams[request_id] = stream
        self._held.add(request_id)
        self._idle.clear()
        link.send(
            Submit(
                request_id=request_id,
                token_ids=prompt.token_ids,
                prefix_keys=prompt.prefix_keys,
                sampling=prompt.sampling,
                batch_class=prompt.batch_class,
                submitted_s=time.monotonic(),
                answer_ids=prompt.answer_ids,
                source=source,
                export_from=export_from,
                export_credit=export_credit,
                offer=offer,
                before=before,
            )
        )
        try:
            yield stream
        finally:
            self._streams.pop(request_id, None)
            if not stream.finished and request_id in self._held and self._link is not None:
                self._link.send(Cancel(request_id))

    async def drain(self, timeout_s: float | None) -> int:
        """Wait until the core holds no request; how many it still holds at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._held)

    def _tell(self, link: FrontLink, command: Command) -> None:
        """To the core that the request was submitted to; another core knows nothing of it."""
        if link is self._link:
            if isinstance(command, Stage):
                self._staged.update(block.inbox_slot for block in command.blocks)
            link.send(command)
        elif isinstance(command, Stage):
            self.inbox.release(block.inbox_slot for block in command.blocks)

    async def _supervise(self, loaded: asyncio.Future[None]) -> None:
        """One core after the other, for as long as the front lives."""
        delay_s = RESTART_DELAY_S
        while True:
            started_s = time.monotonic()
            try:
                await self._run_core(loaded)
            except StartupError as error:
                if not loaded.done():
                    loaded.set_exception(error)
                    return
                _log.error("engine core does not start: %s", error)
            lived_s = time.monotonic() - started_s
            delay_s = RESTART_DELAY_S if lived_s > 30 else min(delay_s * 2, MAX_RESTART_DELAY_S)
            _log.warning("engine core died after %.1f s; restarting in %.1f s", lived_s, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_core(self, loaded: asyncio.Future[None]) -> None:
        """From the start of a core to its death. Raises StartupError if it cannot start."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._spawn(theirs)
        try:
            async with FrontLink(ours) as link:
                first = await link.receive()
                if isinstance(first, Failed):
                    raise StartupError(first.message)
                assert isinstance(first, Ready)
                self._come_up(link, first)
                if not loaded.done():
                    loaded.set_result(None)
                while True:
                    report = await link.receive()
                    assert isinstance(report, StepReport)
                    self._deliver(report)
        except LinkClosed:
            if not loaded.done():
                raise StartupError("the engine core died while loading the model") from None
        finally:
            self._go_down()
            await _end(process)

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        # Not asyncio's way: uvloop forks, and what gRPC does in the child of a fork now
        # and then waits for ever. This is a vfork, where gRPC does nothing.
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "worker.core", "--fd", str(theirs.fileno())),
                *("--memory-fd", str(self._memory_fd)),
                *("--cores-shared-by", str(self._cores_shared_by)),
                *("--role", self._role.value),
            ],
            pass_fds=[theirs.fileno(), self._memory_fd],
            stdin=subprocess.PIPE,
        )
        # Not on its command line, which everyone can read: there may be a password in it.
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(mesh_config.to_json(self._config).encode())
        return process

    def _come_up(self, link: FrontLink, ready: Ready) -> None:
        info = ready.info
        self._link = link
        self._info = info
        if self._arena is None:
            self._arena = BlockArena(self._memory_fd, ready.layout)
            self._inbox = Inbox(ready.layout.num_inbox)
        self.hub.restart(uuid.uuid4().hex, num_blocks=info.num_blocks)
        link.send(self._settings)
        self._on_core(True)

    def _go_down(self) -> None:
        if self._link is None:
            return
        self._link = None
        self._held.clear()
        self._idle.set()
        self._free_inbox(list(self._staged))
        self.hub.load = EMPTY_LOAD
        error = Unavailable("the engine core died", reason="ENGINE_DIED")
        for stream in self._streams.values():
            stream.fail(error)
        self._on_core(False)

    def _deliver(self, report: StepReport) -> None:
        for plain in report.tokens:
            stream = self._streams.get(plain[0])
            if stream is not None:
                stream.push(to_token(plain))
                if stream.num_unread > self._max_unread_tokens and not stream.finished:
                    self._give_up(stream)
        self._deliver_blocks(report)
        for request_id, error in report.failed:
            if (stream := self._streams.get(request_id)) is not None:
                stream.fail(Unavailable(f"the engine gave it up: {error}", reason="ENGINE_REFUSED"))
        self._held.difference_update(report.released)
        if not self._held:
            self._idle.set()
        for stage, duration_s in report.bubbles:
            self._on_bubble(stage, duration_s)
        self.hub.apply(report)

    def _give_up(self, stream: TokenStream) -> None:
        """Nobody takes its tokens. Its slot and KV are for others, whenever it hears of that."""
        del self._streams[stream.request_id]
        stream.fail(
            Overloaded(
                f"the client reads too slowly: {stream.num_unread} tokens of its answer wait"
                " (worker.max_unread_tokens)",
                reason="SLOW_CLIENT",
            )
        )
        if self._link is not None:
            self._link.send(Cancel(stream.request_id))

    def _deliver_blocks(self, report: StepReport) -> None:
        for request_id, num_cached_blocks, phases in report.started:
            if (stream := self._streams.get(request_id)) is not None:
                stream.start(num_cached_blocks, phases)
        for request_id, num_computed in report.progress:
            if (stream := self._streams.get(request_id)) is not None:
                stream.num_computed = num_computed
        for block in report.exported:
            if (stream := self._streams.get(block.request_id)) is not None:
                stream.export(block)
            elif self._link is not None:
                self._link.send(FreeOutbox((block.outbox_slot,)))
        for request_id, error in report.transfers:
            if (stream := self._streams.get(request_id)) is not None:
                stream.end_transfer(error)
        for request_id, num_drafted, num_accepted in report.verified:
            if (stream := self._streams.get(request_id)) is not None:
                stream.num_drafted += num_drafted
                stream.num_accepted += num_accepted
        self._free_inbox(report.inbox_freed)
        if report.stored and self.info.kv_readable:
            for callback in self._on_stored:
                callback(report.stored)

    def _free_inbox(self, slots: list[int]) -> None:
        self._staged.difference_update(slots)
        self.inbox.release(slots)


def _settings(config: MeshConfig) -> Settings:
    return Settings(
        max_step_ms=config.worker.max_step_ms,
        max_draft_tokens=config.worker.max_draft_tokens,
        handoff_export_blocks=config.worker.handoff_export_blocks,
        delay_ms=config.debug.delay_ms,
    )


async def _end(process: subprocess.Popen[bytes]) -> None:
    """The closed link tells the core to end; a core that does not is killed."""
    try:
        async with asyncio.timeout(CLOSE_GRACE_S):
            await asyncio.to_thread(process.wait)
    except TimeoutError:
        _log.warning("engine core did not end in %.0f s; killing it", CLOSE_GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
            await asyncio.to_thread(process.wait)

"""The worker's front: starts the engine core, feeds it, hands out what it makes.

An engine that dies takes no front with it: requests in flight end with
UNAVAILABLE, and a new core is started.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from services.core import config as mesh_config
from services.core.config import MeshConfig, Snapshot
from services.core.errors import MeshError, Overloaded, Unavailable
from services.core.sampling import Sampling
from services.runtime.startup import StartupError
from worker.engines.contract import EngineInfo
from worker.link import FrontLink, LinkClosed
from worker.messages import Cancel, Failed, Ready, Settings, StepReport, Submit, Token
from worker.watch import EMPTY_LOAD, WatchHub

_log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 5.0
CLOSE_GRACE_S = 3.0


class Arrival(NamedTuple):
    """Tokens that came since the last look, and when the last of them came."""

    tokens: list[Token]
    received_s: float


class TokenStream:
    """The tokens of one request: all that is ready at each look, never fewer, never delayed."""

    def __init__(self) -> None:
        self.finished = False
        self._tokens: list[Token] = []
        self._received_s = 0.0
        self._error: MeshError | None = None
        self._awake = asyncio.Event()

    def push(self, token: Token, received_s: float) -> None:
        self._tokens.append(token)
        self._received_s = received_s
        self.finished = bool(token.finish)
        self._awake.set()

    def fail(self, error: MeshError) -> None:
        self._error = error
        self._awake.set()

    async def next(self) -> Arrival:
        """Waits for at least one token. Raises the error that ended the stream."""
        await self._awake.wait()
        self._awake.clear()
        if not self._tokens and self._error is not None:
            raise self._error
        arrival = Arrival(self._tokens, self._received_s)
        self._tokens = []
        if self._error is not None:
            self._awake.set()  # the tokens first, then the error
        return arrival


class EngineFront:
    """Owns the core process. Enter it to wait for the engine to be loaded."""

    def __init__(self, config: MeshConfig, *, cores_shared_by: int) -> None:
        self.hub = WatchHub()
        self._config = config
        self._cores_shared_by = cores_shared_by
        self._request_ids = itertools.count(1)
        self._streams: dict[int, TokenStream] = {}
        # Requests that the core has not yet let go of: their slot and KV are in use.
        self._held: set[int] = set()
        self._link: FrontLink | None = None
        self._info: EngineInfo | None = None
        self._max_waiting = config.worker.max_waiting
        self._settings = _settings(config)
        self._on_core: Callable[[bool], None] = lambda up: None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def info(self) -> EngineInfo:
        """What the engine is; known once entered."""
        if self._info is None:
            raise RuntimeError("the engine has not been loaded yet")
        return self._info

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

    def on_core(self, callback: Callable[[bool], None]) -> None:
        """Called with False when the core dies, and with True when a new one is ready."""
        self._on_core = callback

    def configure(self, snapshot: Snapshot) -> None:
        self._max_waiting = snapshot.config.worker.max_waiting
        self._settings = _settings(snapshot.config)
        if self._link is not None:
            self._link.send(self._settings)

    @contextmanager
    def submit(
        self,
        token_ids: npt.NDArray[np.uint32],
        prefix_keys: tuple[bytes, ...],
        sampling: Sampling,
        *,
        batch_class: bool,
        answer_ids: tuple[int, ...] = (),
    ) -> Iterator[TokenStream]:
        """Run one request. Leaving the context ends it, whatever state it is in.

        `answer_ids`: the part of the answer that exists already; its next token comes first.
        """
        if self._link is None:
            raise Unavailable("the engine core is restarting", reason="ENGINE_RESTARTING")
        if len(self._streams) >= self.info.num_slots + self._max_waiting:
            raise Overloaded(
                f"{len(self._streams)} requests are here already (worker.max_waiting)",
                reason="WORKER_QUEUE_FULL",
                retry_delay_s=1.0,
            )
        request_id = next(self._request_ids)
        stream = self._streams[request_id] = TokenStream()
        self._held.add(request_id)
        self._idle.clear()
        self._link.send(
            Submit(
                request_id,
                token_ids,
                prefix_keys,
                sampling,
                batch_class,
                time.monotonic(),
                answer_ids,
            )
        )
        try:
            yield stream
        finally:
            del self._streams[request_id]
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
            process = await self._spawn(theirs)
        try:
            async with FrontLink(ours) as link:
                first = await link.receive()
                if isinstance(first, Failed):
                    raise StartupError(first.message)
                assert isinstance(first, Ready)
                self._come_up(link, first.info)
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

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker.core", "--fd", str(theirs.fileno())),
            *("--config", mesh_config.to_json(self._config)),
            *("--cores-shared-by", str(self._cores_shared_by)),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
        )

    def _come_up(self, link: FrontLink, info: EngineInfo) -> None:
        self._link = link
        self._info = info
        self.hub.restart(uuid.uuid4().hex, num_blocks=info.num_blocks)
        link.send(self._settings)
        self._on_core(True)

    def _go_down(self) -> None:
        if self._link is None:
            return
        self._link = None
        self._held.clear()
        self._idle.set()
        self.hub.load = EMPTY_LOAD
        error = Unavailable("the engine core died", reason="ENGINE_DIED")
        for stream in self._streams.values():
            stream.fail(error)
        self._on_core(False)

    def _deliver(self, report: StepReport) -> None:
        received_s = time.monotonic()
        for token in report.tokens:
            stream = self._streams.get(token.request_id)
            if stream is not None:
                stream.push(token, received_s)
        self._held.difference_update(report.released)
        if not self._held:
            self._idle.set()
        self.hub.apply(report)


def _settings(config: MeshConfig) -> Settings:
    return Settings(max_step_ms=config.worker.max_step_ms, delay_ms=config.debug.delay_ms)


async def _end(process: asyncio.subprocess.Process) -> None:
    """The closed link tells the core to end; a core that does not is killed."""
    try:
        async with asyncio.timeout(CLOSE_GRACE_S):
            await process.wait()
    except TimeoutError:
        _log.warning("engine core did not end in %.0f s; killing it", CLOSE_GRACE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

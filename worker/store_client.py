"""The KV store that this worker uses, through the store's deaths and restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from firsttoken.control.v1 import control_pb2
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from services.core.kvblocks import ArenaLayout, Bytes
from services.runtime.channels import open_channel
from services.runtime.local_sockets import is_local, is_reachable
from services.runtime.logs import event
from services.runtime.membership import ControlClient, Members
from services.runtime.sharing import open_shared
from services.runtime.tasks import end_tasks
from services.runtime.tls import Tls

PING_TIMEOUT_S = 1.0
PING_PAUSE_S = (0.1, 5.0)  # first, longest

logger = logging.getLogger(__name__)


class Store:
    """One KV store process. `arena`: its L1, None when it is not on this host."""

    def __init__(
        self, member: control_pb2.Member, arena: Bytes | None, tls: Tls | None = None
    ) -> None:
        self.member_id = member.id
        self.arena = arena
        self._tls = tls
        self._tls_generation = tls.generation if tls else 0
        local = is_local(member.local_address) and is_reachable(member.local_address)
        self._channel = open_channel(member.local_address if local else member.address, tls)
        self._channel.get_state(try_to_connect=True)
        # kvstore_pb2_grpc.KvStoreServiceAsyncStub, which exists for type checkers only.
        self.stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        self._num_users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def is_outdated(self) -> bool:
        """Its channel has TLS files that others have replaced."""
        return self._tls is not None and self._tls.generation != self._tls_generation

    @contextmanager
    def use(self) -> Iterator[None]:
        """The channel stays open meanwhile: closing it would cancel the calls on it."""
        self._num_users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._unused.set()

    async def match(
        self, chain: Sequence[bytes], *, timeout_s: float | None = None
    ) -> kvstore_pb2.MatchResponse:
        request = kvstore_pb2.MatchRequest(chain=b"".join(chain))
        response: kvstore_pb2.MatchResponse = await self.stub.Match(request, timeout=timeout_s)
        return response

    async def close(self) -> None:
        """Once nobody uses it."""
        await self._unused.wait()
        await self._channel.close()


class StoreClient:
    """An async context manager that follows membership.

    A store whose memory can be mapped is preferred: it is on this host. The others are
    used over gRPC. One that did not answer in time is left alone until it does.
    """

    def __init__(self, control: ControlClient, *, block_bytes: int) -> None:
        self._control = control
        self._block_bytes = block_bytes
        self._store: Store | None = None
        self._candidates: tuple[control_pb2.Member, ...] = ()
        self._changed = asyncio.Event()
        self._answers = True
        self._retired: set[asyncio.Task[None]] = set()
        self._on_change: list[Callable[[], None]] = []

    async def __aenter__(self) -> Self:
        self._control.on_members(self._follow)
        await self._choose()
        self._task = asyncio.create_task(self._keep_choosing(), name="kv store client")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """After whoever uses the store has ended."""
        await end_tasks([self._task])
        self._retire()
        while self._retired:
            await asyncio.wait(self._retired)

    @property
    def store(self) -> Store | None:
        """None: there is none, or it does not answer."""
        return self._store if self._answers else None

    @property
    def hangs(self) -> bool:
        """There is one, and it does not answer."""
        return self._store is not None and not self._answers

    def on_change(self, callback: Callable[[], None]) -> None:
        """Called when another store is used, or none."""
        self._on_change.append(callback)

    def suspect(self, store: Store) -> None:
        """It did not answer in time or cannot be reached: it is not used until it answers."""
        if store is self._store and self._answers:
            self._answers = False
            self._changed.set()

    def _follow(self, members: Members) -> None:
        self._candidates = tuple(
            member
            for member in members
            if member.role == control_pb2.MEMBER_ROLE_KVSTORE
            and member.state == control_pb2.MEMBER_STATE_READY
        )
        self._changed.set()

    async def _keep_choosing(self) -> None:
        pause_s = 0.0
        while True:
            if self._answers:
                pause_s = 0.0
                await self._changed.wait()
                self._changed.clear()
            await self._choose()
            store = self._store
            if self._answers or store is None:
                continue
            self._answers = await self._ping(store)
            if self._answers and pause_s:
                event(logger, logging.INFO, "kv store answers again", store=store.member_id)
            elif not self._answers:
                if not pause_s:
                    event(
                        logger, logging.WARNING, "kv store does not answer", store=store.member_id
                    )
                pause_s = min(2 * pause_s or PING_PAUSE_S[0], PING_PAUSE_S[1])
                await asyncio.sleep(pause_s)

    async def _choose(self) -> None:
        """Stay with the store in use while it is there."""
        candidates = self._candidates
        current = self._store
        if current is not None:
            present = current.member_id in {member.id for member in candidates}
            present = present and not current.is_outdated
            if present and (current.arena is not None or len(candidates) == 1):
                return
        for member in candidates:
            arena = await self._map(member)
            if arena is not None:
                self._take(Store(member, arena, self._control.tls))
                return
        if current is None or not present:
            tls = self._control.tls
            self._take(Store(candidates[0], None, tls) if candidates else None)

    async def _map(self, member: control_pb2.Member) -> Bytes | None:
        try:
            shared = await open_shared(member.memory_socket)
        except OSError:
            return None
        layout = ArenaLayout.for_blocks(self._block_bytes, len(shared.array))
        return layout.arena(shared.array)

    def _take(self, store: Store | None) -> None:
        self._retire()
        self._store = store
        self._answers = True
        for callback in self._on_change:
            callback()
        if store is not None:
            how = "gRPC" if store.arena is None else "shared memory"
            event(logger, logging.INFO, "using kv store", store=store.member_id, through=how)

    def _retire(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            task = asyncio.create_task(store.close(), name="close kv store channel")
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    async def _ping(self, store: Store) -> bool:
        try:
            with store.use():
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await store.match([])
        except (TimeoutError, grpc.aio.AioRpcError):
            return False
        return True

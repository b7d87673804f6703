"""The KV store as a node: one per host, beside its workers."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import uuid
from contextlib import AsyncExitStack

from firsttoken.control.v1 import control_pb2
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from kvstore.memory_tier import MemoryTier
from kvstore.metrics import METRICS, read
from kvstore.redis_tier import RedisTier
from kvstore.service import KvStoreServicer
from kvstore.store import KvStore
from services.core.config import Snapshot
from services.core.settings import KvStoreSettings
from services.runtime.local_sockets import local_address_for
from services.runtime.logs import event
from services.runtime.membership import ControlClient
from services.runtime.reporter import Reporter
from services.runtime.resource import Resource
from services.runtime.server import MeshServer
from services.runtime.sharing import MemoryServer
from services.runtime.startup import StartupError
from services.runtime.tasks import end_tasks
from services.runtime.tls import Tls

SERVICE_NAME = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"].full_name
STOP_GRACE_S = 1.0
CHECK_INTERVAL_S = 30.0

logger = logging.getLogger(__name__)


class KvStoreNode(Resource):
    """An async context manager: entered, it is a ready member of the mesh.

    Entering raises StartupError when it cannot be; a Redis that does not answer is no
    reason. Leaving lets what is committed go down to Redis, for a bounded time.
    """

    def __init__(
        self, *, control: str, listen: str = "127.0.0.1:0", tls: Tls | None = None
    ) -> None:
        self._control_address = control
        self._tls = tls
        self._listen = listen
        self.id = f"kvstore-{uuid.uuid4().hex[:8]}"
        self.address = ""

    async def _open(self, stack: AsyncExitStack) -> None:
        control = await stack.enter_async_context(
            ControlClient(self._control_address, self._member(), tls=self._tls)
        )
        reporter = await stack.enter_async_context(
            Reporter(service="kvstore", member_id=self.id, tls=self._tls)
        )
        reporter.follow(control)
        settings = control.snapshot.config.kvstore
        tier2 = RedisTier(settings) if settings.redis_url else None
        self.store = await stack.enter_async_context(KvStore(_memory_tier(settings), tier2))
        self.store.on_evicted = lambda keys: reporter.evicted(self.id, keys)
        reporter.watch(METRICS, lambda: read(self.store))
        memory = await stack.enter_async_context(MemoryServer(self.store.tier1.arena.fd))
        server = MeshServer(
            self._listen,
            service_names=[SERVICE_NAME],
            tls=self._tls,
            local_address=local_address_for(control.snapshot.config.mesh),
        )
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(
            KvStoreServicer(self.store), server.server
        )
        await stack.enter_async_context(server)
        checking = asyncio.create_task(self._check_when_idle(), name="kv integrity")
        stack.push_async_callback(end_tasks, [checking])

        def configure(snapshot: Snapshot) -> None:
            self.store.tier1.set_tenant_share(snapshot.config.kvstore.max_tenant_share)
            if tier2 is not None:
                tier2.throttle(snapshot.config.kvstore.debug_l2_bytes_per_s)

        control.on_config(configure)
        await server.set_serving(True)
        self.address = server.address
        control.update(
            address=self.address,
            local_address=server.local_address,
            memory_socket=memory.name,
            state=control_pb2.MEMBER_STATE_READY,
            detail="",
        )
        # Leaving runs in reverse: say so, end the streams, then what they need.
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.callback(self.store.tier1.feed.close)
        stack.callback(control.update, state=control_pb2.MEMBER_STATE_DRAINING)

    async def _check_when_idle(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if not self.store.is_idle:
                continue
            try:
                self.store.check_integrity()
            except AssertionError:
                event(logger, logging.ERROR, "the books of the store do not balance", exc_info=True)

    def _member(self) -> control_pb2.Member:
        return control_pb2.Member(
            id=self.id,
            role=control_pb2.MEMBER_ROLE_KVSTORE,
            state=control_pb2.MEMBER_STATE_STARTING,
            detail="making room",
            pid=os.getpid(),
        )


def _memory_tier(settings: KvStoreSettings) -> MemoryTier:
    if sys.platform != "linux":
        raise StartupError("the KV store needs Linux: its memory is a memfd")
    try:
        return MemoryTier(
            capacity_bytes=settings.capacity_mb << 20,
            policy=settings.eviction_policy,
            max_tenant_share=settings.max_tenant_share,
        )
    except OSError as error:
        raise StartupError(f"cannot have {settings.capacity_mb} MiB of memory: {error}") from error

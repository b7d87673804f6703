"""The control service as a node."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.control.hub import Hub
from services.control.service import ControlService
from services.control.store import MemoryStore, Store
from services.core.settings import MeshConfig
from services.runtime.resource import Resource
from services.runtime.server import MeshServer
from services.runtime.tasks import end_tasks
from services.runtime.tls import Tls

SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
# Its calls are short, and who does not read his stream would hold it up in vain.
STOP_GRACE_S = 1.0
# Between two looks at the time, and at the secret, for whether the keys are still the same.
RENEWAL_INTERVAL_S = 1.0


class ControlNode(Resource):
    """An async context manager: entered, it serves `config` at `.address`."""

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        config: MeshConfig | None = None,
        *,
        tls: Tls | None = None,
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._config = config or MeshConfig()
        self._hub: Hub | None = None
        self.address = ""

    async def _open(self, stack: AsyncExitStack) -> None:
        store = await stack.enter_async_context(open_store(self._config))
        self._hub = hub = Hub(store)
        hub.renew_ticket_keys(time.time())
        renewing = asyncio.create_task(_renew_ticket_keys(hub), name="renew ticket keys")
        stack.push_async_callback(end_tasks, [renewing])
        server = MeshServer(self._listen, service_names=[SERVICE_NAME], tls=self._tls)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(hub), server.server)
        await stack.enter_async_context(server)
        # Leaving runs in reverse: the streams end before the server waits for them.
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.callback(hub.close)
        await server.set_serving(True)
        self.address = server.address

    def check_integrity(self) -> None:
        if self._hub is not None:
            self._hub.check_integrity()


async def _renew_ticket_keys(hub: Hub) -> None:
    while True:
        await asyncio.sleep(RENEWAL_INTERVAL_S)
        hub.renew_ticket_keys(time.time())


def open_store(config: MeshConfig) -> Store:
    if config.control.redis_url:
        # Its imports take longer than all else that a control process starts with.
        from services.control.redis_store import RedisStore

        return RedisStore(config.control.redis_url, config)
    return MemoryStore(config)

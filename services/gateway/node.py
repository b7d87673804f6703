"""The gateway as a node: a member of the mesh that speaks OpenAI's HTTP."""

from __future__ import annotations

import asyncio
import os
import uuid
from contextlib import AsyncExitStack

from firsttoken._workers import WorkerChannels
from firsttoken.control.v1 import control_pb2
from services.gateway.app import Edge
from services.gateway.gateway import Gateway
from services.gateway.metrics import METRICS
from services.gateway.served import load_served
from services.gateway.server import HttpServer
from services.runtime.channel_pool import PoolSize
from services.runtime.channels import Channels, open_channel
from services.runtime.membership import ControlClient
from services.runtime.reporter import Reporter
from services.runtime.resource import Resource
from services.runtime.tls import Tls


class GatewayNode(Resource):
    """An async context manager: entered, it is a ready member of the mesh, serving at `.address`.

    Its readiness as a member is its own: routers and workers may come later, which /ready
    tells. Entering raises StartupError or InvalidArgument when it cannot be.
    """

    def __init__(
        self, *, control: str, listen: str = "127.0.0.1:0", tls: Tls | None = None
    ) -> None:
        self._control = control
        self._listen = listen
        self._tls = tls
        self.id = f"gateway-{uuid.uuid4().hex[:8]}"
        self.address = ""

    @property
    def gateway(self) -> Gateway:
        return self._gateway

    @property
    def server(self) -> HttpServer:
        return self._server

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{self.address}"

    async def _open(self, stack: AsyncExitStack) -> None:
        control = await stack.enter_async_context(
            ControlClient(self._control, self._member(), tls=self._tls)
        )
        config = control.snapshot.config
        reporter = await stack.enter_async_context(
            Reporter(service="gateway", member_id=self.id, tls=self._tls)
        )
        served = await asyncio.to_thread(
            load_served, config.mesh, max_context_tokens=config.worker.max_context_tokens
        )
        size = PoolSize.of(config.mesh)
        channels = await stack.enter_async_context(Channels(self._tls, size=size))
        workers = WorkerChannels(
            lambda address, server_name: open_channel(address, self._tls),
            encrypted=self._tls is not None,
            generation=lambda: self._tls.generation if self._tls else 0,
        )
        stack.push_async_callback(workers.close)
        self._gateway = Gateway(control.snapshot, served, channels, workers, reporter)
        self._server = HttpServer(Edge(self._gateway), self._listen, config.gateway, tls=self._tls)
        self._gateway.watch_server(self._server)
        control.on_config(self._gateway.configure)
        control.on_members(channels.learn)  # before those who open and drop them
        control.on_members(self._gateway.update_members)
        reporter.follow(control)
        reporter.watch(METRICS, self._gateway.metrics.read)
        await stack.enter_async_context(self._server)
        self.address = self._server.address
        control.update(
            address=self.address,
            model=served.model,
            state=control_pb2.MEMBER_STATE_READY,
            detail="",
        )
        # Leaving runs in reverse: say so, end the answers, then what they need.
        stack.callback(control.update, state=control_pb2.MEMBER_STATE_DRAINING)
        stack.callback(self._gateway.drain)

    def _member(self) -> control_pb2.Member:
        return control_pb2.Member(
            id=self.id,
            role=control_pb2.MEMBER_ROLE_GATEWAY,
            state=control_pb2.MEMBER_STATE_STARTING,
            detail="loading the vocabulary",
            pid=os.getpid(),
        )

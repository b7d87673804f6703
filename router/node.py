"""The router as a node: a member of the mesh that serves InferenceService."""

from __future__ import annotations

import os
import uuid
from contextlib import AsyncExitStack

from firsttoken.control.v1 import control_pb2
from firsttoken.router.v1 import router_pb2_grpc
from router import operators
from router.mesh import Mesh
from router.service import SERVICE_NAME, InferenceService
from services.encoding.metrics import METRICS as TOKENIZER_METRICS
from services.runtime.channel_pool import PoolSize
from services.runtime.channels import Channels
from services.runtime.identity import CallerInterceptor
from services.runtime.local_sockets import local_address_for
from services.runtime.membership import ControlClient
from services.runtime.reporter import Reporter
from services.runtime.resource import Resource
from services.runtime.server import MeshServer
from services.runtime.startup import parse_listen
from services.runtime.tls import Tls


class RouterNode(Resource):
    """An async context manager: entered, it is a ready member of the mesh, serving at `.address`.

    Its health is its own: SERVING once it has joined, with workers or without. A
    request waits for them, and is told when none comes. Entering raises
    StartupError when it cannot be.
    """

    def __init__(
        self,
        *,
        control: str,
        listen: str = "127.0.0.1:0",
        tls: Tls | None = None,
        mtls_listen: str = "",
        operator_listen: str = "",
    ) -> None:
        self._control = control
        self._listen = listen
        self._tls = tls
        self._mtls_listen = mtls_listen
        self._operator_listen = operator_listen or f"{parse_listen(listen).host}:0"
        self.mtls_address = ""
        self.id = f"router-{uuid.uuid4().hex[:8]}"
        self.address = ""
        self.operator_address = ""

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    async def _open(self, stack: AsyncExitStack) -> None:
        control = await stack.enter_async_context(
            ControlClient(self._control, self._member(), tls=self._tls)
        )
        reporter = await stack.enter_async_context(
            Reporter(service="router", member_id=self.id, tls=self._tls)
        )
        size = PoolSize.of(control.snapshot.config.mesh)
        channels = await stack.enter_async_context(Channels(self._tls, size=size))
        self._mesh = Mesh(
            control.snapshot,
            channels,
            reporter,
            router_id=self.id,
            ticket_keys=lambda: control.ticket_keys,
            has_tls=self._tls is not None,
        )
        stack.push_async_callback(self._mesh.close)
        await stack.enter_async_context(self._mesh.watching)
        await stack.enter_async_context(self._mesh.following)
        reporter.watch(operators.METRICS, lambda: operators.read_metrics(self._mesh))
        reporter.watch(TOKENIZER_METRICS, self._mesh.tokenizers.embedded.read_metrics)
        operator_server = MeshServer(
            self._operator_listen, service_names=[operators.SERVICE_NAME], tls=self._tls
        )
        router_pb2_grpc.add_RouterServiceServicer_to_server(
            operators.RouterServicer(self._mesh), operator_server.server
        )
        await stack.enter_async_context(operator_server)
        await operator_server.set_serving(True)
        self.operator_address = operator_server.address
        server = MeshServer(
            self._listen,
            service_names=[SERVICE_NAME],
            interceptors=[CallerInterceptor(self._mesh)],
            reflection=self._has_reflection(),
            tls=self._tls,
            for_callers=True,
            mtls_listen=self._mtls_listen,
            local_address=local_address_for(control.snapshot.config.mesh),
        )
        InferenceService(self._mesh).add_to(server.server)
        control.on_config(self._mesh.configure)
        control.on_members(channels.learn)  # before those who open and drop them
        control.on_members(self._mesh.update_members)
        reporter.follow(control)
        await stack.enter_async_context(server)
        await server.set_serving(True)
        self.address = server.address
        self.mtls_address = server.mtls_address
        control.update(
            address=self.address,
            local_address=server.local_address,
            operator_address=self.operator_address,
            state=control_pb2.MEMBER_STATE_READY,
        )
        # Leaving runs in reverse: say so, end the calls, then what they need.
        stack.callback(control.update, state=control_pb2.MEMBER_STATE_DRAINING)

    def _has_reflection(self) -> bool:
        wanted = self._mesh.snapshot.config.router.reflection
        is_open = not self._mesh.tenants.required and self._tls is None
        return wanted == "always" or (wanted == "auto" and is_open)

    def _member(self) -> control_pb2.Member:
        return control_pb2.Member(
            id=self.id,
            role=control_pb2.MEMBER_ROLE_ROUTER,
            state=control_pb2.MEMBER_STATE_STARTING,
            pid=os.getpid(),
        )

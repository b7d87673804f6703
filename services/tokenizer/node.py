"""The tokenizer as a node: it loads the mesh's model's vocabulary and serves it."""

from __future__ import annotations

import asyncio
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from firsttoken.control.v1 import control_pb2
from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.encoding.loading import load_encoder
from services.encoding.metrics import METRICS
from services.runtime.local_sockets import local_address_for
from services.runtime.membership import ControlClient
from services.runtime.reporter import Reporter
from services.runtime.resource import Resource
from services.runtime.server import MeshServer
from services.runtime.tls import Tls
from services.tokenizer.service import Backend, TokenizerService

SERVICE_NAME = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name


class TokenizerNode(Resource):
    """An async context manager: entered, it is a ready member of the mesh, serving at `.address`.

    Entering raises StartupError or InvalidArgument when it cannot be.
    """

    def __init__(
        self, *, control: str, listen: str = "127.0.0.1:0", tls: Tls | None = None
    ) -> None:
        self._control = control
        self._tls = tls
        self._listen = listen
        self.id = f"tokenizer-{uuid.uuid4().hex[:8]}"
        self.address = ""

    async def _open(self, stack: AsyncExitStack) -> None:
        control = await stack.enter_async_context(
            ControlClient(self._control, self._member(), tls=self._tls)
        )
        config = control.snapshot.config
        reporter = await stack.enter_async_context(
            Reporter(service="tokenizer", member_id=self.id, tls=self._tls)
        )
        reporter.follow(control)
        encoder = await asyncio.to_thread(load_encoder, config.mesh)
        threads = ThreadPoolExecutor(config.tokenizer.threads, thread_name_prefix="encode")
        # Waiting for threads would block the loop.
        stack.push_async_callback(asyncio.to_thread, threads.shutdown, cancel_futures=True)
        server = MeshServer(
            self._listen,
            service_names=[SERVICE_NAME],
            tls=self._tls,
            local_address=local_address_for(control.snapshot.config.mesh),
        )
        service = TokenizerService(Backend(encoder, threads, control, reporter))
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(service, server.server)
        reporter.watch(METRICS, lambda: service.counts.read(encoder.counts))
        await stack.enter_async_context(server)
        await server.set_serving(True)
        self.address = server.address
        control.update(
            address=self.address,
            local_address=server.local_address,
            model=encoder.model,
            state=control_pb2.MEMBER_STATE_READY,
            detail="",
        )
        # Leaving runs in reverse: say so, end the calls, then what they need.
        stack.callback(control.update, state=control_pb2.MEMBER_STATE_DRAINING)

    def _member(self) -> control_pb2.Member:
        return control_pb2.Member(
            id=self.id,
            role=control_pb2.MEMBER_ROLE_TOKENIZER,
            state=control_pb2.MEMBER_STATE_STARTING,
            detail="loading the vocabulary",
            pid=os.getpid(),
        )

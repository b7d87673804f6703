"""The HTTP server of the gateway: its socket, its connections, and how they end."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import AsyncExitStack
from email.utils import formatdate
from typing import Any

from uvicorn.server import ServerState

from services.core.settings import GatewaySettings
from services.gateway.connection import Connection, ConnectionBounds, make_config
from services.runtime.listening import bind
from services.runtime.logs import event
from services.runtime.resource import Resource
from services.runtime.tasks import end_tasks
from services.runtime.tls import CERTIFICATE_FILE, KEY_FILE, Tls

BACKLOG = 2048
HANDSHAKE_TIMEOUT_S = 10.0
TICK_S = 1.0
# What requests that were cancelled may take to say so.
CANCEL_GRACE_S = 1.0
POLL_S = 0.02

logger = logging.getLogger(__name__)


class HttpServer(Resource):
    """An async context manager: entered, it serves the ASGI application at `.address`.

    Entering raises StartupError when the port is taken. With `tls` it speaks HTTPS, with
    the files of the moment in which a client connects.
    """

    def __init__(
        self, app: Any, listen: str, settings: GatewaySettings, *, tls: Tls | None = None
    ) -> None:
        self._app = app
        self._listen = listen
        self._settings = settings
        self._tls = tls
        self._tls_generation = 0
        self._state = ServerState()
        self.address = ""

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    async def _open(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        config = make_config(self._app, keep_alive_s=settings.keep_alive_s)
        bounds = ConnectionBounds(
            settings.max_connections,
            settings.max_header_bytes,
            settings.header_timeout_s,
            settings.write_timeout_s,
        )
        context = self._new_context()
        listening, self.address = await bind(self._listen)
        self._tick(context)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(config, self._state, bounds),
            sock=listening,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if context else None,
            backlog=BACKLOG,
        )
        stack.push_async_callback(self._stop)
        ticking = asyncio.create_task(self._keep_ticking(context), name="http clock")
        stack.push_async_callback(end_tasks, [ticking])

    async def _stop(self) -> None:
        connections, tasks = self._state.connections, self._state.tasks
        # 1. Accept nobody any more.
        self._server.close()
        # 2. Hang up where nothing is asked; elsewhere after the answer.
        for connection in list(connections):
            connection.shutdown()
        # 3. Let answers end until the deadline.
        await _until_empty(connections, self._settings.drain_s)
        # 4. Cancel the others, which may say so.
        for task in list(tasks):
            task.cancel()
        await _until_empty(tasks, CANCEL_GRACE_S)
        # 5. Hang up on who is still there.
        if connections:
            event(logger, logging.WARNING, "connections cut", count=len(connections))
        for connection in list(connections):
            connection.transport.abort()
        await _until_empty(connections, CANCEL_GRACE_S)
        await end_tasks(list(tasks))

    async def _keep_ticking(self, context: ssl.SSLContext | None) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(context)

    def _tick(self, context: ssl.SSLContext | None) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        if self._tls is None or context is None:
            return
        if self._tls.generation != self._tls_generation:
            self._load(self._tls, context)

    def _new_context(self) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(self._tls, context)
        return context

    def _load(self, tls: Tls, context: ssl.SSLContext) -> None:
        self._tls_generation = tls.generation
        try:
            context.load_cert_chain(tls.directory / CERTIFICATE_FILE, tls.directory / KEY_FILE)
        except (OSError, ssl.SSLError) as error:  # caught halfway through a change
            self._tls_generation = 0
            event(logger, logging.ERROR, "TLS files not taken", reason=str(error))


async def _until_empty(things: set[Any], patience_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + patience_s
    while things and loop.time() < deadline_s:  # noqa: ASYNC110 (uvicorn's sets tell nobody)
        await asyncio.sleep(POLL_S)

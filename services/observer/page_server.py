"""The HTTP server of the page and its API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import uvicorn

from services.runtime.listening import bind
from services.runtime.logs import event
from services.runtime.resource import Resource
from services.runtime.tasks import end_tasks
from services.runtime.tls import CERTIFICATE_FILE, KEY_FILE, Tls

STOP_TIMEOUT_S = 1
POLL_S = 0.01
TLS_POLL_S = 1.0

logger = logging.getLogger(__name__)


class PageServer(Resource):
    """An async context manager: entered, it serves the ASGI application at `.address`.

    Entering raises StartupError when the port is taken. With `tls` it speaks HTTPS, with the
    files of the moment in which a browser connects.
    """

    def __init__(self, app: Any, listen: str, *, tls: Tls | None = None) -> None:
        self._app = app
        self._listen = listen
        self._tls = tls
        self.address = ""

    async def _open(self, stack: AsyncExitStack) -> None:
        tls = self._tls
        files: dict[str, Any] = {}
        if tls is not None:
            files["ssl_certfile"] = tls.directory / CERTIFICATE_FILE
            files["ssl_keyfile"] = tls.directory / KEY_FILE
        config = uvicorn.Config(
            self._app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            **files,
        )
        listening, self.address = await bind(self._listen)
        stack.callback(listening.close)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="page")
        stack.push_async_callback(self._stop)
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(POLL_S)
        if self._serving.done():
            self._serving.result()

        if tls is not None and config.ssl is not None:
            following = asyncio.create_task(_follow_files(tls, config.ssl), name="page TLS")
            stack.push_async_callback(end_tasks, [following])

    async def _stop(self) -> None:
        self._server.should_exit = True
        await asyncio.wait({self._serving})


async def _follow_files(tls: Tls, context: ssl.SSLContext) -> None:
    generation = tls.generation
    while True:
        await asyncio.sleep(TLS_POLL_S)
        if tls.generation == generation:
            continue
        try:
            context.load_cert_chain(tls.directory / CERTIFICATE_FILE, tls.directory / KEY_FILE)
            generation = tls.generation
        except (OSError, ssl.SSLError) as error:  # caught halfway through a change
            event(logger, logging.ERROR, "TLS files not taken", reason=str(error))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own business."""
        yield

"""One HTTP connection: uvicorn's, with bounds on all that a client can make us wait for.

uvicorn bounds the time between two requests. Here also: the time and the bytes until the
headers are complete, how long a client may leave its answer untaken, and how many there are.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NamedTuple

import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from services.gateway.errors import SERVER_ERROR, ApiError, retry_headers


class ConnectionBounds(NamedTuple):
    max_connections: int
    max_header_bytes: int
    header_timeout_s: float
    write_timeout_s: float


class Connection(HttpToolsProtocol):
    def __init__(self, config: Config, state: ServerState, bounds: ConnectionBounds) -> None:
        super().__init__(config, state, app_state={})
        self._bounds = bounds
        self._in_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Else a small chunk waits for the acknowledgement of the one before.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self._bounds.max_connections:
            message = f"there are {self._bounds.max_connections} connections already"
            headers = retry_headers(1.0)
            self._refuse(
                ApiError(503, message, type=SERVER_ERROR, code="too_many", headers=headers)
            )
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data) if self._in_headers else 0
        super().data_received(data)
        if self._in_headers and self._header_bytes > self._bounds.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._await_headers()

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._in_headers = False
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._bounds.max_header_bytes:
            self._refuse_headers()
            return
        super().on_headers_complete()
        if self.parser.should_upgrade():
            # What would follow is no HTTP/1.1 to the parser.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._bounds.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(
                self._bounds.header_timeout_s, self._give_up_headers
            )

    def _give_up_headers(self) -> None:
        self._header_timer = None
        if self.is_answering:  # an earlier request of this connection has its own bounds
            self._await_headers()
        elif self._header_bytes:
            rule = f"the headers must come within {self._bounds.header_timeout_s:g} s"
            self._refuse(ApiError(408, rule, code="header_timeout"))
        else:
            self.transport.close()

    def _refuse_headers(self) -> None:
        rule = f"request line and headers must be at most {self._bounds.max_header_bytes} bytes"
        self._refuse(ApiError(431, rule, code="headers_too_long"))

    def _refuse(self, error: ApiError) -> None:
        """Say why, unless that would land in the middle of another answer; and hang up."""
        if not (self.is_answering or self.transport.is_closing()):
            body = orjson.dumps(error.body())
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                **error.headers,
            }
            head = [STATUS_LINE[error.status]]
            head += [b"%s: %s\r\n" % pair for pair in self.server_state.default_headers]
            head += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
            self.transport.write(b"".join([*head, b"\r\n", body]))
        self._cancel_timers()
        self.transport.close()

    def _cancel_timers(self) -> None:
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._write_timer = None
        self._unset_keepalive_if_required()


def make_config(app: Any, *, keep_alive_s: float) -> Config:
    """What uvicorn's protocol reads; nothing of uvicorn's own server and logging."""
    config = Config(
        app,
        interface="asgi3",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        # What its application lets through is logged there.
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
    )
    config.load()
    return config

"""One HTTP connection: uvicorn's, with bounds on all that a client can make us wait for.

uvicorn bounds the time between two requests. Here also: the time and the bytes until the
headers are complete, how long a client may leave its answer untaken, and how many there are.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import httptools
import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from services.gateway.errors import ApiError, unavailable
from services.gateway.exchange import LINGER_BYTES, LINGER_S

# What a chunk may cost beside its bytes: its length, in digits, and two line ends.
CHUNK_BYTES = 32
# Requests of one packet that ask for another protocol.
MAX_UPGRADES = 16


class ConnectionBounds(NamedTuple):
    max_connections: int
    max_header_bytes: int
    header_timeout_s: float
    write_timeout_s: float


class Connection(HttpToolsProtocol):
    """A client that is refused is heard out for a moment: it would otherwise meet a reset
    connection instead of the reason.
    """

    def __init__(self, config: Config, state: ServerState, bounds: ConnectionBounds) -> None:
        super().__init__(config, state, app_state={})
        self._bounds = bounds
        # The request line and headers of a request are coming; of it there is a part.
        self._in_headers = True
        self._is_begun = False
        self._header_bytes = 0
        # Of a request's body: what came that is neither content nor lengths of chunks.
        self._framing_bytes = 0
        self._num_messages = 0
        self._num_upgrades = 0
        self._refused_bytes: int | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Else a small chunk waits for the acknowledgement of the one before.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        most = self._bounds.max_connections
        if len(self.connections) > 2 * most:
            transport.abort()
        elif len(self.connections) > most:
            message = f"there are {most} connections already (gateway.max_connections)"
            self._refuse(unavailable(message, code="too_many_connections"))
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused_bytes is not None:
            self._refused_bytes += len(data)
            if self._refused_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._num_upgrades = 0
        if not self._is_answering:
            # Also for what begins no request: a line end between two of them.
            self._await_headers()
        rest = data
        while rest and not self._is_over:
            rest = self._feed(rest)

    def _feed(self, data: bytes) -> bytes:
        """What is left of `data` for another parser."""
        in_body, num_messages = not self._in_headers, self._num_messages
        self._header_bytes += 0 if in_body else len(data)
        self._framing_bytes += len(data) if in_body else 0
        rest = b""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("this is no HTTP/1.1 request")
        if (self._in_headers and self._header_bytes > self._bounds.max_header_bytes) or (
            in_body
            and num_messages == self._num_messages
            and self._framing_bytes > self._bounds.max_header_bytes
        ):
            self._refuse_headers()
        return rest

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = self._is_begun = True
        self._num_messages += 1
        self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer, behind a body, is no header: it could name another caller.
        if self._in_headers:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._framing_bytes -= CHUNK_BYTES

    def on_headers_complete(self) -> None:
        if self._is_over or self.parser.should_upgrade():
            return
        self._in_headers = self._is_begun = False
        self._header_bytes = self._framing_bytes = 0
        self._cancel("headers")
        size = len(self.url) + sum(
            len(name) + len(value) + len(b": \r\n") for name, value in self.headers
        )
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if size > self._bounds.max_header_bytes:
            self._refuse_headers()
        elif version not in ("1.0", "1.1"):
            self.send_400_response(f"HTTP/{version} is not spoken here: use HTTP/1.1")
        elif num_hosts > 1 or (version == "1.1" and not num_hosts):  # RFC 9112, 3.2
            self.send_400_response(f"there must be one Host header; got {num_hosts}")
        elif codings not in ([], [b"chunked"]):
            self.send_400_response("transfer-encoding can only be chunked")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        if not self._is_over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._is_over or self.parser.should_upgrade()):
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._later("write", self._bounds.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel("write")

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_over(self) -> bool:
        return self._refused_bytes is not None or self.transport.is_closing()

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Nothing is offered, so that it is an ordinary request (RFC 9110, 7.8): for curl,
        which asks for HTTP/2 in this way, and sends its body all the same.
        """
        method, headers = self.parser.get_method(), self.headers
        self._num_upgrades += 1
        if method == b"CONNECT" or self._is_over or self._num_upgrades > MAX_UPGRADES:
            self.send_400_response("nothing can be reached through here")
            return b""
        kept = [pair for pair in headers if pair[0] not in (b"upgrade", b"connection")]
        if any(b"close" in value.lower() for name, value in headers if name == b"connection"):
            kept.append((b"connection", b"close"))
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % pair for pair in kept]
        self.parser = httptools.HttpRequestParser(self)
        # These headers were counted, and come once more.
        self._in_headers, self._header_bytes = True, 0
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _await_headers(self) -> None:
        if "headers" not in self._timers:
            self._later("headers", self._bounds.header_timeout_s, self._give_up_headers)

    def _give_up_headers(self) -> None:
        self._cancel("headers")
        if self._is_answering:  # an earlier request of this connection has its own bounds
            self._await_headers()
        elif self._is_begun:
            rule = f"the headers must come within {self._bounds.header_timeout_s:g} s"
            self._refuse(ApiError(408, rule, code="header_timeout"))
        else:
            self._hang_up()

    def _refuse_headers(self) -> None:
        rule = f"request line and headers must be at most {self._bounds.max_header_bytes} bytes"
        self._refuse(ApiError(431, rule, code="headers_too_long"))

    def _refuse(self, error: ApiError) -> None:
        """Say why, unless that would land in the middle of another answer; and hang up."""
        if self._is_over:
            return
        self._cancel_timers()
        cycle, alone = self.cycle, not self.pipeline
        if self._is_answering and alone and cycle.more_body and not cycle.response_started:
            # The request is broken itself: its application hears that the client is gone.
            cycle.disconnected = cycle.response_complete = True
            cycle.message_event.set()
        if self._is_answering or not self.transport.can_write_eof():
            if not self._is_answering:
                self.transport.write(self._written(error))
            self._hang_up()
            return
        self._refused_bytes = 0
        self.transport.write(self._written(error))
        self.transport.write_eof()
        self._later("linger", LINGER_S, self.transport.abort)

    def _hang_up(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """A transport that closes waits for a client to take what is written, for ever."""
        self._later("end", self._bounds.write_timeout_s, self.transport.abort)

    def _written(self, error: ApiError) -> bytes:
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
        return b"".join([*head, b"\r\n", body])

    def _later(self, name: str, delay_s: float, call: Callable[[], object]) -> None:
        self._cancel(name)
        self._timers[name] = self.loop.call_later(delay_s, call)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _cancel_timers(self) -> None:
        for name in list(self._timers):
            self._cancel(name)
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

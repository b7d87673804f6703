"""One request and its response: what a route reads, and how it answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from services.gateway.errors import ApiError, ClientGone
from services.gateway.sse import event
from services.runtime.telemetry import TraceContext

# In the scope of a request.
EXCHANGE = "firsttoken.exchange"
JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
# A client that was refused before its body was read: what it may still send before we hang
# up. Else it would meet a reset connection instead of the reason.
LINGER_S = 1.0
LINGER_BYTES = 1 << 20

# A key in each of its two headers.
MAX_KEYS = 2

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# What gRPC takes, well within its bound for all of the metadata.
_METADATA_VALUE = re.compile(r"[\x20-\x7e]{1,2048}")


class Exchange:
    """`trace` is the request's own span, `caller` whose child it is."""

    def __init__(self, scope: Scope) -> None:
        self.arrived_s = time.monotonic()
        self.headers = Headers(scope=scope)
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.client = scope.get("client")
        self.request_id = _request_id(self.headers)
        self.caller = TraceContext.from_metadata(
            (name, value)
            for name in ("traceparent", "tracestate")
            for value in self.headers.getlist(name)
        )
        self.trace = self.caller
        # For metrics and logs: what is known by the time the answer ends.
        self.route = "other"
        self.request_class = "none"
        self.status = 0
        self.ttft_s: float | None = None
        self.error = self.error_code = ""
        self.path_params: Mapping[str, str] = {}
        self.is_streaming = False
        self._receive: Receive
        self._send: Send
        self._body_is_read = False
        self._is_answered = False

    def attach(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    def credentials(self) -> tuple[tuple[str, str], ...]:
        """The caller's keys, as gRPC metadata; "" for what gRPC would not carry: nobody's key."""
        found = tuple(
            (name, value if _METADATA_VALUE.fullmatch(value) else "")
            for name in ("authorization", "x-api-key")
            for value in self.headers.getlist(name)
        )
        if len(found) > MAX_KEYS:
            raise ApiError(400, f"send one API key; got {len(found)}", code="too_many_keys")
        return found

    async def read_json_body(self, *, max_bytes: int, timeout_s: float) -> bytes:
        """Raises ApiError for another kind of body, one too long or too slow, and ClientGone."""
        self._check_content_type()
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise _too_long(max_bytes)
        parts: list[bytes] = []
        room = max_bytes
        try:
            async with asyncio.timeout(timeout_s):
                while not self._body_is_read:
                    part = await self._read_part()
                    room -= len(part)
                    if room < 0:
                        raise _too_long(max_bytes)
                    parts.append(part)
        except TimeoutError:
            rule = f"the body must come within {timeout_s:g} s (gateway.body_timeout_s)"
            raise ApiError(408, rule, code="body_timeout") from None
        return b"".join(parts)

    async def respond(
        self, status: int, content: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        """`content` as JSON, or as it is when it is bytes."""
        body = content if isinstance(content, bytes) else orjson.dumps(content)
        head = {"content-type": JSON, "content-length": str(len(body)), **(headers or {})}
        unread = not self._body_is_read and self._has_body
        if unread:
            head["connection"] = "close"
        await self._start(status, head)
        await self._send_body(body, more=unread)
        if unread:
            await self._linger()
            await self._send_body(b"", more=False)

    async def begin_stream(self) -> None:
        self.is_streaming = True
        await self._start(
            200,
            {
                "content-type": EVENT_STREAM,
                "cache-control": "no-cache",
                # nginx would collect it otherwise.
                "x-accel-buffering": "no",
            },
        )

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more: who does not read holds up only itself."""
        await self._send_body(data, more=True)

    async def end_stream(self, data: bytes = b"") -> None:
        self.is_streaming = False
        await self._send_body(data, more=False)

    async def break_off(self, error: ApiError) -> None:
        """End a stream with an event that clients take for an error, and no [DONE]."""
        self.error, self.error_code = error.message, error.code or error.type
        await self.end_stream(event(error.body()))

    @contextlib.asynccontextmanager
    async def while_client_waits(self) -> AsyncIterator[None]:
        """Cancels what is in it when the client leaves, and raises ClientGone. After the body."""
        task = asyncio.current_task()
        assert task is not None
        left = False

        def leave(watching: asyncio.Task[None]) -> None:
            nonlocal left
            # The server says "disconnect" also once the answer is complete.
            if not (watching.cancelled() or self._is_answered):
                left = True
                task.cancel()

        watching = asyncio.create_task(self._until_client_leaves(), name="watch a client")
        watching.add_done_callback(leave)
        try:
            yield
            if watching.done() and not self._is_answered:  # it is about to cancel us
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not left or task.uncancel():
                raise
            raise ClientGone from None
        finally:
            watching.remove_done_callback(leave)
            watching.cancel()

    @property
    def _has_body(self) -> bool:
        length = self.headers.get("content-length", "0")
        return length != "0" or "transfer-encoding" in self.headers

    def _check_content_type(self) -> None:
        kind, _, parameters = self.headers.get("content-type", "").partition(";")
        charset = re.search(r'charset="?([^\s;"]+)', parameters)
        if kind.strip().lower() != JSON or (
            charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii")
        ):
            raise ApiError(
                415,
                f"the body must be JSON in UTF-8: send the header content-type: {JSON}",
                code="unsupported_media_type",
            )
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            rule = "the body must not be compressed: leave content-encoding out"
            raise ApiError(415, rule, code="unsupported_media_type")

    async def _read_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._body_is_read = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def _linger(self) -> None:
        num_bytes = 0
        with contextlib.suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(LINGER_S):
                while not self._body_is_read and num_bytes < LINGER_BYTES:
                    num_bytes += len(await self._read_part())

    async def _until_client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        message: Message = {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (name.encode("latin-1"), value.encode("latin-1", errors="replace"))
                for name, value in headers.items()
            ],
        }
        await self._send(message)

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        self._is_answered = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _request_id(headers: Headers) -> str:
    given = headers.getlist("x-request-id")
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0]
    return f"req_{secrets.token_hex(16)}"


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body must be at most {max_bytes} bytes (gateway.max_body_bytes)",
        code="body_too_long",
    )

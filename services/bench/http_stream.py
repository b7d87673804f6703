"""A client of a streaming endpoint that does as little as a client can: it must not be
what is measured. One connection, one request at a time, answers not parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, cast
from urllib.parse import urlsplit

_END = b"0\r\n\r\n"
_EVENT = b"data: "


class Heard(NamedTuple):
    """`ttft_s` and `took_s`: from writing the request to the first event and to the end.
    `num_events`: [DONE] included. `answer`: all of it, headers and framing too."""

    ttft_s: float
    num_events: int
    took_s: float
    answer: bytes


class HttpStream(asyncio.Protocol):
    """`request` is the whole of it, headers included. Raises ConnectionError, also where the
    answer is not 200."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._tail = b""
        self._first_s: float | None = None
        self._heard: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Heard:
        assert self._transport is not None
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        self._pieces, self._tail, self._first_s = [], b"", None
        self._heard = asyncio.get_running_loop().create_future()
        began_s = time.perf_counter()
        self._transport.write(request)
        await self._heard
        assert self._first_s is not None
        took_s = time.perf_counter() - began_s
        answer = b"".join(self._pieces)
        return Heard(self._first_s - began_s, answer.count(_EVENT), took_s, answer)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._pieces.append(data)
        if self._first_s is None:
            head, is_whole, body = b"".join(self._pieces).partition(b"\r\n\r\n")
            if is_whole and not head.startswith(b"HTTP/1.1 200"):
                self._fail((head + body).decode(errors="replace"))
            elif _EVENT in body:
                self._first_s = now_s
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the connection was closed")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_exception(ConnectionError(reason))


@asynccontextmanager
async def open_stream(url: str) -> AsyncIterator[HttpStream]:
    host, port = _place(url)
    _, stream = await asyncio.get_running_loop().create_connection(HttpStream, host, port)
    try:
        yield stream
    finally:
        stream.close()


def post(url: str, path: str, body: bytes, *, api_key: str = "") -> bytes:
    """A request as it is written."""
    host, port = _place(url)
    credentials = f"authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"{credentials}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"must be http://host:port; got {url!r}")
    return parts.hostname, parts.port

"""A gRPC client of streaming calls that does as little as a client can: it must not be what
is measured. HTTP/2 by hand, of which it knows what a server of ours sends; what comes is
kept as it came, and read when the measurement is over."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple, cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW = 4
_HEAD_BYTES, _PREFIX_BYTES = 9, 5
# As large as a window can be: a client that reads at once never holds the server up.
NO_LIMIT = (1 << 31) - 1
_FIRST_WINDOW = 65_535


class Message(NamedTuple):
    """`at_s`: when the last of it came, on this machine's monotonic clock."""

    at_s: float
    data: bytes


class Call:
    """What came of one call."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def messages(self) -> Iterator[Message]:
        pending = bytearray()
        for at_s, piece in self.pieces:
            pending += piece
            while len(pending) >= _PREFIX_BYTES:
                end = _PREFIX_BYTES + int.from_bytes(pending[1:_PREFIX_BYTES], "big")
                if len(pending) < end:
                    break
                yield Message(at_s, bytes(pending[_PREFIX_BYTES:end]))
                del pending[:end]


class RawGrpc(asyncio.Protocol):
    """One connection. `window_bytes`: of each call, what may come unread."""

    def __init__(self, *, window_bytes: int = NO_LIMIT) -> None:
        self._window_bytes = window_bytes
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._unparsed = b""

    def call(self, path: str, request: bytes) -> Call:
        call = self._calls[self._next_id] = Call(self._next_id)
        self._next_id += 2
        headers = (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"mesh"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
        prefixed = b"\0" + len(request).to_bytes(4, "big") + request
        self._write(
            _frame(_HEADERS, _END_HEADERS, call.stream_id, block)
            + _frame(_DATA, _END_STREAM, call.stream_id, prefixed)
        )
        return call

    def take(self, call: Call, num_bytes: int) -> None:
        """So much more of it may come."""
        self._write(_frame(_WINDOW, 0, call.stream_id, num_bytes.to_bytes(4, "big")))

    def cancel(self, call: Call) -> None:
        self._write(_frame(_RESET, 0, call.stream_id, (8).to_bytes(4, "big")))
        self._end(call.stream_id)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = _INITIAL_WINDOW.to_bytes(2, "big") + self._window_bytes.to_bytes(4, "big")
        more = (NO_LIMIT - _FIRST_WINDOW).to_bytes(4, "big")
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, more))

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        data = self._unparsed + data
        at, end = 0, len(data)
        while end - at >= _HEAD_BYTES:
            payload_at = at + _HEAD_BYTES
            next_at = payload_at + int.from_bytes(data[at : at + 3], "big")
            if next_at > end:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream_id = int.from_bytes(data[at + 5 : payload_at], "big")
            if kind == _DATA and stream_id in self._calls:
                self._calls[stream_id].pieces.append((now_s, data[payload_at:next_at]))
            elif not stream_id:
                self._serve_connection(kind, flags, data[payload_at:next_at])
            if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                self._end(stream_id)
            at = next_at
        self._unparsed = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        for stream_id in list(self._calls):
            self._end(stream_id)

    def _serve_connection(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY:
            self.close()

    def _end(self, stream_id: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is not None and not call.ended.done():
            call.ended.set_result(None)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


async def connect(address: str, *, window_bytes: int = NO_LIMIT) -> RawGrpc:
    """`address`: host:port. Whoever connects closes."""
    host, _, port = address.rpartition(":")
    _, raw = await asyncio.get_running_loop().create_connection(
        lambda: RawGrpc(window_bytes=window_bytes), host, int(port)
    )
    return raw


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream_id.to_bytes(4, "big") + payload


def _text(text: bytes) -> bytes:
    """HPACK, for what is shorter than its integers of one byte."""
    assert len(text) < 127
    return bytes([len(text)]) + text

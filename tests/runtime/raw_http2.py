"""HTTP/2 by hand, for what no gRPC client would send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 4, 6, 7, 9
RST_STREAM = 3
END_STREAM, END_HEADERS, ACK = 1, 4, 1
MAX_FRAME_BYTES = 16384
TIMEOUT_S = 30.0

Header = tuple[bytes, bytes]


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def request_headers(path: str, more: Iterable[Header] = ()) -> list[Header]:
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"mesh"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    ]


def encode(headers: Iterable[Header]) -> bytes:
    """HPACK, each a literal that is not indexed."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def header_frames(stream: int, headers: Iterable[Header]) -> bytes:
    block = encode(headers)
    parts = [block[i : i + MAX_FRAME_BYTES] for i in range(0, len(block), MAX_FRAME_BYTES)]
    kinds = [HEADERS] + [CONTINUATION] * (len(parts) - 1)
    flags = [0] * (len(parts) - 1) + [END_HEADERS]
    return b"".join(
        frame(kind, flag, stream, part)
        for kind, flag, part in zip(kinds, flags, parts, strict=True)
    )


def message_frame(stream: int, message: bytes, *, announced: int | None = None) -> bytes:
    """`announced`: the length that its prefix gives, when it lies."""
    length = len(message) if announced is None else announced
    prefixed = b"\0" + length.to_bytes(4, "big") + message
    return frame(DATA, 0, stream, prefixed)


class RawConnection:
    """An async context manager around a connection that has said its preface."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")

    async def __aenter__(self) -> RawConnection:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        self.send(PREFACE + frame(SETTINGS, 0, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def until_end_of(self, stream: int) -> list[Frame]:
        """The stream's frames until it ends, or until the connection does."""
        frames: list[Frame] = []
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    got = await self._read()
                except (asyncio.IncompleteReadError, ConnectionError):
                    return frames
                if got.kind == SETTINGS and not got.flags & ACK:
                    self.send(frame(SETTINGS, ACK, 0))
                elif got.kind == PING and not got.flags & ACK:
                    self.send(frame(PING, ACK, 0, got.payload))
                if got.kind == GOAWAY or got.stream == stream:
                    frames.append(got)
                ends = got.kind in (DATA, HEADERS) and got.flags & END_STREAM
                if got.stream == stream and (ends or got.kind == RST_STREAM):
                    return frames

    async def _read(self) -> Frame:
        head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        return Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)


def _text(text: bytes) -> bytes:
    return _integer(len(text)) + text


def _integer(number: int) -> bytes:
    """With a prefix of seven bits (RFC 7541, 5.1)."""
    if number < 127:
        return bytes([number])
    encoded = bytearray([127])
    number -= 127
    while number >= 128:
        encoded.append(number % 128 + 128)
        number //= 128
    return bytes([*encoded, number])

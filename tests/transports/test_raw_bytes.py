"""Bytes at a server's port that are no gRPC: it lives on, and so do its other calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable

import grpc
import pytest

from services.runtime.channel_pool import ONE_CHANNEL
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, MESH_NAME, Tls
from tests.runtime.raw_http2 import (
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    header_frames,
    message_frame,
    request_headers,
)
from tests.runtime.waiting import eventually
from tests.transports.cutting_proxy import connect
from tests.transports.ground import MANY_MANY, ONE_MANY, SERVICE, Plan, Transport, prepare

NUM_EACH = 15
START = PREFACE + frame(SETTINGS, 0, 0)
PATH = f"/{SERVICE}/{MANY_MANY}"


def noise(source: random.Random) -> bytes:
    return source.randbytes(source.randint(1, 3000))


def cut_preface(source: random.Random) -> bytes:
    return PREFACE[: source.randrange(len(PREFACE))]


def noise_after_the_preface(source: random.Random) -> bytes:
    return START + noise(source)


def frames_of_noise(source: random.Random) -> bytes:
    return START + b"".join(
        frame(
            source.randrange(12),
            source.randrange(256),
            source.choice((0, 1, 2, 3, 5, (1 << 31) - 1)),
            source.randbytes(source.choice((0, 1, 4, 5, 8, 40, 300))),
        )
        for _ in range(source.randint(1, 20))
    )


def headers_of_noise(source: random.Random) -> bytes:
    return START + frame(HEADERS, END_HEADERS, 1, noise(source))


def call_with_bytes_flipped(source: random.Random) -> bytes:
    plan = Plan(5).metadata()[0]
    headers = request_headers(PATH, [(plan[0].encode(), b"eyJ9")])
    call = bytearray(START + header_frames(1, headers) + message_frame(1, b"some bytes" * 30))
    for _ in range(source.randint(1, 4)):
        call[source.randrange(len(PREFACE), len(call))] = source.randrange(256)
    return bytes(call)


def call_cut_off(source: random.Random) -> bytes:
    headers = header_frames(1, request_headers(PATH))
    call = START + headers + frame(DATA, 0, 1, b"\0\0\0\1\0" + bytes(100))
    return call[: source.randrange(len(START), len(call))]


MAKERS = (
    noise,
    cut_preface,
    noise_after_the_preface,
    frames_of_noise,
    headers_of_noise,
    call_with_bytes_flipped,
    call_cut_off,
)


async def throw(address: str, data: bytes, context: ssl.SSLContext | None) -> None:
    """What the server says to it is read for a moment; then the connection is closed."""
    if context is None:
        reader, writer = await connect(address)
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=MESH_NAME
        )
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(data)
        async with asyncio.timeout(0.05):
            while await reader.read(1 << 16):
                pass
    writer.transport.abort()


def client_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.directory / CA_FILE))
    context.load_cert_chain(tls.directory / CERTIFICATE_FILE, tls.directory / KEY_FILE)
    context.set_alpn_protocols(["h2"])
    return context


@pytest.mark.parametrize("make", MAKERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("wire", ["tcp", "tls", "within tls", "unix"])
async def test_a_server_lives_on(
    wire: str, make: Callable[[random.Random], bytes], tls: Tls
) -> None:
    source = random.Random(f"{wire} {make.__name__}")
    transport = Transport(wire.removeprefix("within "), ONE_CHANNEL)
    async with prepare(transport, tls) as ground:
        beside = ground.begin(ONE_MANY, Plan(7, (5, 5), hold_at=1))
        await beside.read()
        address = ground.server.local_address or ground.server.address
        context = client_context(tls) if wire == "within tls" else None
        await asyncio.gather(*(throw(address, make(source), context) for _ in range(NUM_EACH)))

        assert await ground.answers()
        await eventually(lambda: ground.service.num_open == 1)
        assert not beside.done()
        beside.cancel()
        await eventually(ground.is_at_rest)
        assert await beside.code() is grpc.StatusCode.CANCELLED

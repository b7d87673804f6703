"""Connections, spoken byte by byte: slow, broken, hostile and patient clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from services.core.config import flatten, nest, parse
from services.core.settings import MeshConfig
from services.gateway.connection import Connection
from tests.gateway.edges import Edge, chat_body, request_bytes, run_edge
from tests.router.meshes import simulated
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SHORT = chat_body(max_tokens=1)
GET = b"GET /health HTTP/1.1\r\nhost: mesh\r\n\r\n"
BOUNDS: dict[str, Any] = {
    "header_timeout_s": 0.3,
    "body_timeout_s": 0.3,
    "keep_alive_s": 1.0,
    "write_timeout_s": 0.5,
    "max_header_bytes": 4096,
}


def configuration(bounds: dict[str, Any]) -> MeshConfig:
    timed = nest(flatten(simulated(timing={"decode_step_ms": 1.0})))
    return parse({**timed, "gateway": bounds})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with run_edge(configuration(BOUNDS)) as edge:
        yield edge


async def talk(edge: Edge, *parts: bytes) -> bytes:
    """All that comes back until the server hangs up."""
    reader, writer = await edge.connect()
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def error_of(response: bytes) -> dict[str, Any]:
    error: dict[str, Any] = orjson.loads(response.partition(b"\r\n\r\n")[2])["error"]
    return error


async def read_response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one answer with a length."""
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.startswith(b"content-length")
        ]
        return head, await reader.readexactly(length)


async def test_small_chunks_never_wait_for_an_acknowledgement(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    made = Connection.connection_made

    def look(connection: Connection, transport: asyncio.Transport) -> None:
        made(connection, transport)
        accepted = transport.get_extra_info("socket")
        seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", look)
    await talk(edge, b"GET /health HTTP/1.0\r\n\r\n")
    reader, writer = await edge.connect()  # and as a client that keeps it
    writer.write(GET)
    await read_response(reader)
    writer.close()

    assert len(seen) == 2
    assert all(seen)


async def test_requests_in_a_row_share_a_connection(edge: Edge) -> None:
    reader, writer = await edge.connect()
    for _ in range(3):
        writer.write(request_bytes(CHAT, SHORT))
        head, body = await read_response(reader)
        assert b"200 OK" in head
        assert b"connection: close" not in head
        assert orjson.loads(body)["choices"]
    writer.close()


async def test_pipelined_requests_are_answered_in_their_order(edge: Edge) -> None:
    reader, writer = await edge.connect()
    slow = request_bytes(CHAT, chat_body(max_tokens=30, ignore_eos=True))
    writer.write(slow + GET + request_bytes("/v1/completions", {}) + GET)

    first, second, third, fourth = [await read_response(reader) for _ in range(4)]

    assert orjson.loads(first[1])["usage"]["completion_tokens"] == 30
    assert orjson.loads(second[1]) == orjson.loads(fourth[1]) == {"status": "ok"}
    assert b"400 Bad Request" in third[0]
    writer.close()


async def test_a_connection_that_rests_is_closed(edge: Edge) -> None:
    assert (await talk(edge, GET)).endswith(b'{"status":"ok"}')
    assert await talk(edge) == b""


@pytest.mark.parametrize(
    "parts",
    [
        [b"P"],
        [b"POST /v1/completions HTTP/1.1\r\n"],
        [b"POST /v1/completions HTTP/1.1\r\nhost: mesh\r\nx: "],
    ],
)
async def test_headers_that_do_not_come_are_not_waited_for(edge: Edge, parts: list[bytes]) -> None:
    response = await talk(edge, *parts)

    assert status_of(response) == 408
    assert error_of(response)["code"] == "header_timeout"


async def test_headers_that_trickle_are_not_waited_for(edge: Edge) -> None:
    reader, writer = await edge.connect()

    async def trickle() -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /health HTTP/1.1\r\n")
            while True:
                writer.write(b"x: y\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(30):
        response = await reader.read()
    trickling.cancel()
    writer.close()

    assert status_of(response) == 408


async def test_the_second_request_of_a_connection_is_not_waited_for_either(edge: Edge) -> None:
    response = await talk(edge, GET, b"GET /hea")

    assert response.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 408" in response


async def test_a_body_that_does_not_come_is_not_waited_for(edge: Edge) -> None:
    whole = request_bytes(CHAT, SHORT)
    for sent in (whole[:-5], whole[: whole.index(b"\r\n\r\n") + 4]):
        response = await talk(edge, sent)
        assert status_of(response) == 408
        assert error_of(response)["code"] == "body_timeout"
        assert b"connection: close" in response


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n",
        b"GET /" + b"y" * 5000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 300_000,
    ],
)
async def test_headers_too_long_are_refused(edge: Edge, head: bytes) -> None:
    response = await talk(edge, head)

    assert status_of(response) == 431
    assert error_of(response)["code"] == "headers_too_long"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad name: x\r\n\r\n",
        b"CONNECT mesh:80 HTTP/1.1\r\nhost: mesh\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: mesh\r\n\r\n",
        b"GET /h\xc3\xa4 HTTP/1.1\r\nhost: mesh\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabc",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
)  # fmt: skip
async def test_what_is_no_http_is_refused_and_nothing_breaks(edge: Edge, garbage: bytes) -> None:
    response = await talk(edge, garbage)

    assert response == b"" or status_of(response) in (400, 404, 405), response
    if response:
        assert error_of(response)["type"] == "invalid_request_error"
    assert (await edge.http.get("/health")).status_code == 200


async def test_garbage_behind_a_request_does_not_end_in_its_answer(edge: Edge) -> None:
    slow = request_bytes(CHAT, chat_body(max_tokens=50, ignore_eos=True, stream=True))
    response = await talk(edge, slow + b"\x00garbage\r\n\r\n")

    assert response.count(b"HTTP/1.1") <= 1
    assert b"invalid_http" not in response


async def test_an_old_client_is_answered_and_left(edge: Edge) -> None:
    response = await talk(edge, b"GET /health HTTP/1.0\r\n\r\n")

    assert status_of(response) == 200
    assert response.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    ("head", "rule"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", "one Host header; got 0"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "one Host header; got 2"),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "one Host header; got 2"),
        (b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n", "HTTP/2.0 is not spoken here"),
    ],
)
async def test_a_request_that_proxies_could_read_in_two_ways_is_refused(
    edge: Edge, head: bytes, rule: str
) -> None:
    response = await talk(edge, head)

    assert status_of(response) == 400
    assert rule in error_of(response)["message"]


async def test_a_line_end_between_requests_keeps_no_connection(edge: Edge) -> None:
    reader, writer = await edge.connect()
    writer.write(GET)
    await read_response(reader)
    writer.write(b"\r\n")
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("ending", [b"garbage\r\n\r\n", b""])
async def test_a_client_that_takes_nothing_is_cut_off_however_it_goes_on(
    edge: Edge, ending: bytes
) -> None:
    host, _, port = edge.node.address.rpartition(":")
    loop = asyncio.get_running_loop()
    many = chat_body(max_tokens=1500, ignore_eos=True, stream=True, n=8, logprobs=True)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, request_bytes(CHAT, {**many, "top_logprobs": 5}))
        server = edge.node.server
        here = sock.getsockname()

        def is_full() -> bool:
            all_of_them = server._state.connections
            ours = [each for each in all_of_them if getattr(each, "client", None) == here]
            return any(isinstance(each, Connection) and each.flow.write_paused for each in ours)

        await eventually(is_full)
        await loop.sock_sendall(sock, ending)

        await edge.idle()
        await eventually(lambda: server.num_connections <= 1, "the connection to be cut")


async def test_another_coding_than_chunked_is_refused(edge: Edge) -> None:
    lines = [f"POST {CHAT} HTTP/1.1", "host: a", "transfer-encoding: gzip, chunked", "", ""]
    head = "\r\n".join(lines).encode()
    response = await talk(edge, head + b"0\r\n\r\n")

    assert status_of(response) == 400
    assert "chunked" in error_of(response)["message"]


async def test_an_upgrade_that_is_not_offered_is_passed_over(edge: Edge) -> None:
    wish = [
        "connection: Upgrade, HTTP2-Settings",
        "upgrade: h2c",
        "http2-settings: AAMAAABkAAQAAP__",
    ]
    response = await talk(edge, request_bytes(CHAT, SHORT, wish))

    assert status_of(response) == 200
    assert b"chat.completion" in response


async def test_a_client_that_asks_first_is_told_to_go_on(edge: Edge) -> None:
    head, _, body = request_bytes(CHAT, SHORT, ["expect: 100-continue"]).partition(b"\r\n\r\n")
    reader, writer = await edge.connect()
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(30):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert b"200 OK" in (await read_response(reader))[0]
    writer.close()


async def test_a_client_that_asks_first_is_refused_without_its_body(edge: Edge) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: mesh\r\ncontent-type: application/json\r\n"
        b"content-length: 100000000\r\nexpect: 100-continue\r\n\r\n"
    )
    response = await talk(edge, head)

    assert status_of(response) == 413
    assert b"100 Continue" not in response


async def test_connections_beyond_the_bound_are_refused() -> None:
    async with run_edge(configuration({"max_connections": 5})) as edge:
        server = edge.node.server
        held = [await edge.connect() for _ in range(5 - server.num_connections)]
        await eventually(lambda: server.num_connections == 5)

        response = await talk(edge, GET)

        assert status_of(response) == 503
        assert b"retry-after: 1" in response
        assert error_of(response)["type"] == "server_error"
        for _, writer in held:
            writer.close()
        await eventually(lambda: server.num_connections < 5)
        assert status_of(await talk(edge, GET.replace(b"1.1", b"1.0"))) == 200


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: mesh\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n"
)


def chunks_of(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


@pytest.mark.parametrize(
    "unit", [b"x-a: b\r\n" * 500, b"x" * 4000], ids=["many trailers", "one long trailer"]
)
async def test_endless_trailers_are_refused(edge: Edge, unit: bytes) -> None:
    response = await talk(edge, CHUNKED + b"\r\n2\r\n{}\r\n0\r\n", *[unit] * 100)

    assert status_of(response) == 431


async def test_an_endless_extension_of_a_chunk_is_refused(edge: Edge) -> None:
    response = await talk(edge, CHUNKED + b"\r\n2;", *[b"x" * 4000] * 100)

    assert status_of(response) == 431


async def test_a_body_in_tiny_chunks_is_as_good_as_any(edge: Edge) -> None:
    body = orjson.dumps({"prompt": "x" + " " * 6000, "max_tokens": 1})
    head = CHUNKED + b"connection: close\r\n\r\n"
    response = await talk(edge, head, *[chunks_of(body, 1), b"0\r\nx-checked: 1\r\n\r\n"])

    assert status_of(response) == 200


async def test_a_trailer_is_no_header(edge: Edge) -> None:
    body = chunks_of(orjson.dumps({"prompt": "Once", "max_tokens": 1}), 64)
    head = CHUNKED.replace(b"content-type: application/json\r\n", b"") + b"connection: close\r\n"
    trailer = b"0\r\ncontent-type: application/json\r\nx-request-id: mine\r\n\r\n"
    response = await talk(edge, head + b"\r\n" + body + trailer)

    assert status_of(response) == 415
    assert b"mine" not in response


async def test_a_chunk_without_a_length_is_told_so(edge: Edge) -> None:
    response = await talk(edge, CHUNKED + b"\r\nzz\r\n")

    assert status_of(response) == 400
    assert error_of(response)["code"] == "invalid_http"
    await edge.idle()


async def test_upgrades_in_a_row_are_bounded(edge: Edge) -> None:
    wish = GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"

    with contextlib.suppress(ConnectionError):  # one that sends on is not listened to for long
        await talk(edge, wish * 2500)
    few = await talk(edge, wish * 17)

    assert b"HTTP/1.1 500" not in few
    assert status_of(await talk(edge, GET)) == 200
    await edge.idle()


async def test_an_upgrade_leaves_the_wish_to_close(edge: Edge) -> None:
    wish = GET[:-2] + b"connection: close, upgrade\r\nupgrade: h2c\r\n\r\n"
    reader, writer = await edge.connect()
    writer.write(wish)
    head, _ = await read_response(reader)
    writer.close()

    assert b"200 OK" in head
    assert b"connection: close" in head

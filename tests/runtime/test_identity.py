"""Who calls, below gRPC's own clients: what only somebody who means no good would send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from services.cli.local_ca import LocalCa
from services.core.config import parse
from services.core.errors import MeshError, Overloaded
from services.core.tenants import Tenant, Tenants, hash_key
from services.runtime import logs
from services.runtime.identity import (
    MAX_METADATA_BYTES,
    CallBounds,
    CallerInterceptor,
    caller,
    check_size,
    identify,
    keys_in,
)
from services.runtime.interceptor import Context
from services.runtime.server import MeshServer
from services.runtime.tls import MESH_NAME, Tls
from tests.runtime.certificates import forge, write
from tests.runtime.raw_http2 import (
    DATA,
    HEADERS,
    RST_STREAM,
    Frame,
    Header,
    RawConnection,
    header_frames,
    message_frame,
    request_headers,
)
from tests.runtime.waiting import eventually
from tests.runtime.wires import dial

ACME, BEE = "ft-acme", "ft-bee"
METHOD, HEALTH = "/test.One/Method", "/grpc.health.v1.Health/Check"
TENANTS = Tenants(
    parse(
        {
            "tenants": {
                "acme": {"key_hashes": hash_key(ACME), "identities": "acme.test spiffe://acme/a"},
                "bee": {"key_hashes": hash_key(BEE), "identities": "bee.test"},
            }
        }
    )
)
UNAUTHENTICATED, DENIED, EXHAUSTED, LATE, INVALID = b"16", b"7", b"8", b"4", b"3"


class Edge:
    """Counts who is inside."""

    def __init__(self, bounds: CallBounds) -> None:
        self.tenants = TENANTS
        self.call_bounds = bounds
        self.running = 0
        self.admitted: list[str] = []

    def refused(self, context: Context, tenant: Tenant, error: Overloaded, since_s: float) -> None:
        raise AssertionError("all are admitted here")

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[None]:
        self.admitted.append(tenant.name)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


class Serving:
    """A server whose one method, METHOD, says what it was sent and by whom."""

    def __init__(self, edge: Edge, **options: Any) -> None:
        self.edge = edge
        self.handled: list[bytes] = []
        # Bytes added to each of many answers.
        self.padding = 0
        self.server = MeshServer(
            "127.0.0.1:0",
            service_names=["test.One"],
            interceptors=[CallerInterceptor(edge)],
            for_callers=True,
            max_message_bytes=1 << 20,
            **options,
        )
        handlers: dict[str, Any] = {
            "Method": grpc.unary_unary_rpc_method_handler(self._one),
            "Many": grpc.unary_stream_rpc_method_handler(self._many),
        }
        self.server.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.One", handlers)]
        )

    async def _one(self, request: bytes, context: object) -> bytes:
        self.handled.append(request)
        return b"%s says %s" % (caller().name.encode(), request)

    async def _many(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        self.handled.append(request)
        for number in range(int(request)):
            yield b"%s %d %s" % (caller().name.encode(), number, bytes(self.padding))
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    *, max_deadline_s: float = 60.0, request_timeout_s: float = 30.0, **options: Any
) -> AsyncIterator[Serving]:
    served = Serving(Edge(CallBounds(max_deadline_s, request_timeout_s)), **options)
    async with served.server:
        yield served
        await eventually(lambda: served.edge.running == 0)


async def send(
    served: Serving, headers: list[Header], *, method: str = METHOD, body: bytes | None = None
) -> list[Frame]:
    """What comes back until the stream ends; `body` defaults to a message."""
    async with RawConnection(served.server.address) as connection:
        body = message_frame(1, b"hi") if body is None else body
        connection.send(header_frames(1, request_headers(method, headers)) + body)
        return await connection.until_end_of(1)


def status_of(frames: list[Frame]) -> bytes:
    """The number in the trailers; b"" when the stream was reset or the connection closed."""
    trailers = [frame.payload for frame in frames if frame.kind == HEADERS]
    _, found, rest = trailers[-1].partition(b"grpc-status") if trailers else (b"", b"", b"")
    return rest[1 : 1 + rest[0]] if found else b""


# Metadata as no client of gRPC's would send it.


@pytest.mark.parametrize(
    "header",
    [
        (b"x-api-key", b"\xff\xfe\xa0"),
        (b"x-api-key", ACME.encode() + b"\xa0"),
        (b"x-api-key", ACME.encode() + b"\0"),
        (b"x-api-key", ACME.encode() + b"\n"),
        (b"x-api-key", "ft-acmé".encode()),
        (b"x-api-key", b"k" * (15 << 10)),
        (b"authorization", b"Bearer\0" + ACME.encode()),
        (b"authorization", b"Bearer " + ACME.encode() + b"," + BEE.encode()),
        (b"x-api_key", ACME.encode()),
        (b"firsttoken-tenant", b"acme"),
        (b"x-forwarded-client-cert", b"acme.test"),
    ],
    ids=str,
)
async def test_odd_metadata_is_nobody_s(header: Header) -> None:
    async with serving() as served:
        assert status_of(await send(served, [header])) == UNAUTHENTICATED
        assert status_of(await send(served, [(b"x-api-key", ACME.encode())])) == b"0"

    assert served.handled == [b"hi"]
    assert served.edge.admitted == ["acme"]


@pytest.mark.parametrize(
    "header",
    [(b"X-Api-Key", ACME.encode()), (b"x-api-key-bin", b"no base64!")],
    ids=str,
)
async def test_what_is_no_metadata_resets_the_call(header: Header) -> None:
    async with serving() as served:
        frames = await send(served, [header])

    assert frames[-1].kind == RST_STREAM
    assert served.handled == []
    assert served.edge.admitted == []


@pytest.mark.parametrize("num_bytes", [17 << 10, 1 << 20, 20 << 20])
async def test_too_much_metadata_is_refused_before_the_settings_are_confirmed(
    num_bytes: int,
) -> None:
    async with serving() as served:
        frames = await send(served, [(b"x-api-key", b"k" * num_bytes)])
        assert status_of(frames) == EXHAUSTED
        assert status_of(await send(served, [(b"x-api-key", ACME.encode())])) == b"0"

    assert served.handled == [b"hi"]


async def test_no_line_of_a_process_s_log_holds_a_key_with_a_slip(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        logs.configure("router", "debug")
        async with serving() as served:
            await send(served, [(b"x-api-key", b"ft-secret\xa0")])
            await send(served, [(b"authorization", b"Bearer ft-secret\xff")])
            await send(served, [(b"x-api-key", b"ft-secret")])
        logging.getLogger("grpc._cython.cygrpc").error("another line")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    said = capsys.readouterr().err

    assert "secret" not in said
    assert "another line" in said


# Messages that do not come, or not as they should.


@pytest.mark.parametrize("method", [METHOD, HEALTH])
@pytest.mark.parametrize(
    "body",
    [b"", message_frame(1, b"hi", announced=1000), message_frame(1, b"", announced=2**32 - 1)],
    ids=["none", "a part", "none of a huge one"],
)
async def test_a_message_that_does_not_come_whole_ends_the_call(method: str, body: bytes) -> None:
    async with serving(request_timeout_s=0.2) as served:
        headers = [(b"x-api-key", ACME.encode())]
        assert status_of(await send(served, headers, method=method, body=body)) == LATE

    assert served.handled == []


async def test_many_calls_without_a_message_hold_nothing_for_long() -> None:
    streams = range(1, 401, 2)
    headers = request_headers(METHOD, [(b"x-api-key", ACME.encode())])
    async with (
        serving(request_timeout_s=1.0) as served,
        RawConnection(served.server.address) as connection,
    ):
        connection.send(b"".join(header_frames(stream, headers) for stream in streams))
        await eventually(lambda: len(served.edge.admitted) == len(streams))
        # A call that behaves is served among them.
        assert status_of(await send(served, [(b"x-api-key", ACME.encode())])) == b"0"
        await eventually(lambda: served.edge.running == 0)

    assert served.handled == [b"hi"]


async def test_a_call_that_ends_without_a_message_is_told() -> None:
    end_stream = bytes([0, 0, 0, DATA, 1, 0, 0, 0, 1])
    async with serving() as served:
        frames = await send(served, [(b"x-api-key", ACME.encode())], body=end_stream)

    assert status_of(frames) == INVALID
    assert served.handled == []


async def test_a_stranger_s_message_is_not_waited_for_nor_read() -> None:
    async with serving() as served:
        frames = await send(served, [], body=b"")

    assert status_of(frames) == UNAUTHENTICATED
    assert served.edge.admitted == []


async def test_a_client_that_reads_nothing_holds_its_place_no_longer_than_a_request_may_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(max_deadline_s=0.5) as served, dial(served.server.address) as channel:
        served.padding = 64 << 10
        metadata = (("x-api-key", ACME),)
        call = channel.unary_stream("/test.One/Many")(b"100000", metadata=metadata)
        await eventually(lambda: served.edge.admitted)
        await eventually(lambda: served.edge.running == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "router.max_deadline_s" in (caught.value.details() or "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_shorter_deadline_of_the_callers_counts() -> None:
    async with serving() as served, dial(served.server.address) as channel:
        metadata = (("x-api-key", ACME),)
        call = channel.unary_stream("/test.One/Many")(b"100000000", timeout=0.3, metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        await eventually(lambda: served.edge.running == 0)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_too_long_a_message_is_refused_and_the_next_one_is_served() -> None:
    async with serving() as served, dial(served.server.address) as channel:
        call = channel.unary_unary(METHOD)
        metadata = (("x-api-key", ACME),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(2 << 20), metadata=metadata)
        answer = await call(b"hi", metadata=metadata)

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert answer == b"acme says hi"
    assert served.handled == [b"hi"]


async def test_calls_at_once_are_each_their_own_caller_s() -> None:
    async with serving() as served, dial(served.server.address) as channel:

        async def collect(key: str) -> set[bytes]:
            call = channel.unary_stream("/test.One/Many")(b"50", metadata=(("x-api-key", key),))
            return {message.split()[0] async for message in call}

        found = await asyncio.gather(*(collect(key) for key in [ACME, BEE] * 20))

    assert found == [{b"acme"}, {b"bee"}] * 20


async def test_cancels_at_the_very_start_are_no_defects(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served, dial(served.server.address) as channel:
        for turn in range(200):
            call = channel.unary_unary(METHOD)(b"hi", metadata=(("x-api-key", ACME),))
            for _ in range(turn % 7):
                await asyncio.sleep(0)
            call.cancel()
        await channel.unary_unary(METHOD)(b"last", metadata=(("x-api-key", ACME),))
        await eventually(lambda: served.edge.running == 0)

    problems = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert problems == []


# Certificates.


@pytest.mark.parametrize(
    ("names", "key", "status"),
    [
        ([x509.DNSName("acme.test")], None, "acme"),
        ([x509.UniformResourceIdentifier("spiffe://acme/a")], None, "acme"),
        ([x509.DNSName("other.test"), x509.DNSName("bee.test")], None, "bee"),
        ([x509.DNSName("acme.test")], ACME, "acme"),
        # The gateway's: it passes on the key of who called it.
        ([x509.DNSName(MESH_NAME)], BEE, "bee"),
        ([x509.DNSName("acme.test")], BEE, "PERMISSION_DENIED"),
        ([x509.DNSName("acme.test"), x509.DNSName("bee.test")], None, "PERMISSION_DENIED"),
        ([x509.DNSName("acme.test")], "ft-nobody", "UNAUTHENTICATED"),
        ([x509.DNSName("*.test")], None, "UNAUTHENTICATED"),
        ([x509.DNSName("ACME.test")], None, "UNAUTHENTICATED"),
        ([x509.DNSName(hash_key(ACME))], None, "UNAUTHENTICATED"),
        ([x509.RFC822Name("acme.test")], None, "UNAUTHENTICATED"),
        ([x509.DNSName(MESH_NAME)], None, "UNAUTHENTICATED"),
    ],
    ids=str,
)
async def test_a_certificate_is_the_tenant_of_its_names(
    names: list[x509.GeneralName], key: str | None, status: str, tmp_path: Path
) -> None:
    ca = LocalCa.new()
    tls = Tls(write(tmp_path, ca.pem.certificate, ca.service()))
    pem = forge(names, ca=ca, common_name="acme.test")
    credentials = grpc.ssl_channel_credentials(ca.pem.certificate, pem.key, pem.certificate)
    options = [("grpc.ssl_target_name_override", MESH_NAME)]
    async with serving(tls=tls, mtls_listen="127.0.0.1:0") as served:
        address = served.server.mtls_address
        channel: Any = grpc.aio.secure_channel(address, credentials, options=options)
        async with channel:
            metadata = (("x-api-key", key),) if key else ()
            try:
                answer = await channel.unary_unary(METHOD)(b"hi", metadata=metadata)
                found = answer.split()[0].decode()
            except grpc.aio.AioRpcError as error:
                found = error.code().name

    assert found == status


# The rules themselves.


def test_everything_that_looks_like_a_key_counts_as_one() -> None:
    metadata: list[tuple[str, str | bytes]] = [
        ("authorization", "Bearer a"),
        ("authorization", "bEARER   b "),
        ("authorization", "Basic c"),
        ("x-api-key", "d"),
        ("x-api-key-bin", b"e"),
        ("proxy-authorization", "Bearer f"),
    ]

    assert keys_in(metadata) == ("a", "b", "", "d")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "NO_CREDENTIALS"),
        ([("x-api-key", "nobody")], "UNKNOWN_CREDENTIALS"),
        ([("x-api-key", ACME), ("x-api-key", BEE)], "SEVERAL_TENANTS"),
        ([("x-api-key", ACME), ("firsttoken-tenant", "bee")], "FOREIGN_TENANT"),
        ([("x-api-key", ACME), ("firsttoken-tenant", "Acme")], "FOREIGN_TENANT"),
        ([("x-api-key", ACME), ("firsttoken-tenant", "acme/salt")], "FOREIGN_TENANT"),
    ],
)
def test_says_what_is_wrong_and_never_the_key(metadata: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(MeshError) as refusal:
        identify(TENANTS, metadata, ())

    assert refusal.value.reason == reason
    for _, value in metadata:
        assert value not in str(refusal.value) or reason == "FOREIGN_TENANT"


def test_the_same_key_twice_is_one_caller() -> None:
    metadata = [("x-api-key", ACME), ("authorization", f"Bearer {ACME}"), ("x-api-key", ACME)]

    assert identify(TENANTS, metadata, ["other.test"]).name == "acme"


def test_metadata_may_be_as_long_as_it_says() -> None:
    check_size([("k", "v" * (MAX_METADATA_BYTES - 3)), ("", b"bb")])
    with pytest.raises(Overloaded, match=f"at most {MAX_METADATA_BYTES} bytes"):
        check_size([("k", "v" * (MAX_METADATA_BYTES - 3)), ("", b"bbb")])

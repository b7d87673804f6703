"""TLS between processes, as an operator uses it and as an attacker meets it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.local_ca import LocalCa, Pem
from services.runtime import server as server_module
from services.runtime.channels import Channels, open_channel
from services.runtime.probe import explain
from services.runtime.server import MeshServer
from services.runtime.startup import StartupError
from services.runtime.tls import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    MESH_NAME,
    Tls,
    is_loopback,
    require_private,
)
from tests.runtime.certificates import DAY, forge, replace, write
from tests.runtime.processes import run, running

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED
CHECK = health_pb2.HealthCheckRequest()
TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def ca() -> LocalCa:
    return LocalCa.new()


@pytest.fixture(scope="module")
def service(ca: LocalCa) -> Pem:
    return ca.service()


@pytest.fixture
def directory(tmp_path: Path, ca: LocalCa, service: Pem) -> Path:
    return write(tmp_path / "tls", ca.pem.certificate, service)


# What the files must be.


def test_what_up_makes_is_taken(directory: Path) -> None:
    tls = Tls(directory)

    assert tls.generation == 1
    assert tls.files.certificate == (directory / CERTIFICATE_FILE).read_bytes()


@pytest.mark.parametrize("name", [CA_FILE, CERTIFICATE_FILE, KEY_FILE])
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()

    with pytest.raises(StartupError, match=f"cannot read {directory / name}: No such file"):
        Tls(directory)


@pytest.mark.parametrize("name", [CA_FILE, CERTIFICATE_FILE, KEY_FILE])
def test_an_unreadable_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).mkdir()

    with pytest.raises(StartupError, match=f"cannot read {directory / name}: Is a directory"):
        Tls(directory)


@pytest.mark.parametrize("name", [CA_FILE, CERTIFICATE_FILE, KEY_FILE])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\x00"])
def test_a_file_that_is_no_pem_is_named(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)

    with pytest.raises(StartupError, match=f"{directory / name} holds no .* in PEM"):
        Tls(directory)


def test_no_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"no directory of TLS files: {tmp_path}/none"):
        Tls(tmp_path / "none")


def test_the_key_of_another_certificate_is_said(directory: Path, ca: LocalCa) -> None:
    (directory / KEY_FILE).write_bytes(ca.service().key)

    with pytest.raises(StartupError, match=r"key\.pem is not the key of .*cert\.pem"):
        Tls(directory)


def test_an_encrypted_key_is_said(directory: Path, service: Pem) -> None:
    key = serialization.load_pem_private_key(service.key, None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (directory / KEY_FILE).write_bytes(encrypted)

    with pytest.raises(StartupError, match=r"key\.pem must not be encrypted"):
        Tls(directory)


@pytest.mark.parametrize(
    ("days", "problem"),
    [((-3, -1), r"cert\.pem expired on 20"), ((1, 3), r"cert\.pem is not valid before 20")],
)
def test_a_certificate_of_another_time_is_said(
    directory: Path, ca: LocalCa, days: tuple[int, int], problem: str
) -> None:
    valid_from, valid_to = (day * DAY for day in days)
    made = forge(ca=ca, valid_from=valid_from, valid_to=valid_to)
    write(directory, ca.pem.certificate, made)

    with pytest.raises(StartupError, match=problem):
        Tls(directory)


def test_an_expired_ca_is_said(directory: Path, service: Pem) -> None:
    expired = forge(valid_from=-3 * DAY, valid_to=-DAY)
    write(directory, expired.certificate, service)

    with pytest.raises(StartupError, match=r"ca\.pem expired on 20"):
        Tls(directory)


def test_a_certificate_of_another_ca_is_said(directory: Path) -> None:
    write(directory, LocalCa.new().pem.certificate, LocalCa.new().service())

    with pytest.raises(StartupError, match=r"cert\.pem is not signed by a CA in .*ca\.pem"):
        Tls(directory)


def test_a_service_needs_the_name_of_the_mesh(directory: Path, ca: LocalCa) -> None:
    write(directory, ca.pem.certificate, ca.client("acme"))

    with pytest.raises(StartupError, match=f"lacks the DNS name {MESH_NAME}"):
        Tls(directory)
    assert Tls(directory, service=False).files.certificate


def test_a_caller_with_a_key_needs_a_ca_alone(directory: Path) -> None:
    (directory / CERTIFICATE_FILE).unlink()
    with pytest.raises(StartupError, match=r"cert\.pem"):
        Tls(directory, service=False)
    (directory / KEY_FILE).unlink()

    assert Tls(directory, service=False).files.certificate == b""


def test_a_chain_leads_over_its_middle(tmp_path: Path) -> None:
    root, strange = LocalCa.new("root"), LocalCa.new("strange")
    signed = forge((), ca=root, common_name="middle")
    key = serialization.load_pem_private_key(signed.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    alone = LocalCa(x509.load_pem_x509_certificate(signed.certificate), key).service()
    chain = alone._replace(certificate=alone.certificate + signed.certificate)

    Tls(write(tmp_path / "whole", root.pem.certificate, chain))
    for ca, pem in ((root, alone), (strange, chain)):
        with pytest.raises(StartupError, match="is not signed"):
            Tls(write(tmp_path / "broken", ca.pem.certificate, pem))


def test_a_certificate_near_its_end_is_warned_of(
    directory: Path, ca: LocalCa, caplog: pytest.LogCaptureFixture
) -> None:
    Tls(directory)
    assert not caplog.records
    write(directory, ca.pem.certificate, forge(ca=ca, valid_to=3 * DAY))
    Tls(directory)

    assert [record.message for record in caplog.records] == ["certificate expires soon"]


# Rereading.


def test_new_files_are_taken(directory: Path, ca: LocalCa) -> None:
    tls = Tls(directory, check_interval_s=0)
    fresh = ca.service()
    write(directory, ca.pem.certificate, fresh)

    assert tls.generation > 1
    assert tls.files.certificate == fresh.certificate


def test_touched_files_are_the_same(directory: Path) -> None:
    tls = Tls(directory, check_interval_s=0)
    (directory / CERTIFICATE_FILE).touch()

    assert tls.generation == 1


@pytest.mark.parametrize("name", [CA_FILE, CERTIFICATE_FILE, KEY_FILE])
def test_a_broken_new_file_keeps_the_pair_and_is_logged_once(
    directory: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(directory, check_interval_s=0)
    good = (directory / name).read_bytes()
    replace(directory / name, b"broken")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert tls.generation == 1
            tls.channel_credentials()

    messages = [record.message for record in caplog.records]
    assert messages == ["TLS files not taken; those before stay"]
    assert tls.files.ca
    assert tls.files.key

    replace(directory / name, good)
    assert tls.generation == 1
    (directory / name).unlink()
    assert tls.generation == 1
    assert len(caplog.records) == 2  # another problem: it is gone


def test_a_pair_that_is_replaced_file_by_file_is_taken_when_whole(
    directory: Path, ca: LocalCa
) -> None:
    tls = Tls(directory, check_interval_s=0)
    fresh = ca.service()
    replace(directory / CERTIFICATE_FILE, fresh.certificate)
    assert tls.generation == 1
    replace(directory / KEY_FILE, fresh.key)

    assert tls.generation == 2
    assert (tls.files.certificate, tls.files.key) == fresh


# Who gets in.


@asynccontextmanager
async def serving(tls: Tls, **options: Any) -> AsyncIterator[MeshServer]:
    """One that says what it knows of its caller, and streams without end."""

    async def whoami(request: bytes, context: Any) -> bytes:
        names = context.auth_context().get("peer_dns", ())
        return b",".join(names)

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        number = 0
        while True:
            yield str(number).encode()
            number += 1
            await asyncio.sleep(0.01)

    server = MeshServer("127.0.0.1:0", service_names=["test.One"], tls=tls, **options)
    handlers: dict[str, Any] = {
        "WhoAmI": grpc.unary_unary_rpc_method_handler(whoami),
        "Count": grpc.unary_stream_rpc_method_handler(count),
    }
    server.server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.One", handlers)]
    )
    async with server:
        yield server


def connect(address: str, ca: bytes, pem: Pem | None, name: str = MESH_NAME) -> Any:
    """A channel as anybody may make it."""
    key, certificate = (pem.key, pem.certificate) if pem else (None, None)
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(address, credentials, options=options)


async def whoami(channel: Any) -> bytes:
    answer = await channel.unary_unary("/test.One/WhoAmI")(b"", timeout=TIMEOUT_S)
    assert isinstance(answer, bytes)
    return answer


async def refusal(channel: Any) -> grpc.StatusCode:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await whoami(channel)
    code = caught.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


async def test_services_know_each_other_by_the_name_of_the_mesh(directory: Path) -> None:
    tls = Tls(directory)
    async with serving(tls) as server, open_channel(server.address, tls) as channel:
        untyped: Any = channel
        assert MESH_NAME.encode() in (await whoami(untyped)).split(b",")
        answer = await health_pb2_grpc.HealthStub(channel).Check(CHECK)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_plaintext_does_not_get_in(directory: Path) -> None:
    async with serving(Tls(directory)) as server:
        assert await refusal(open_channel(server.address)) is UNAVAILABLE


STRANGERS: dict[str, Callable[[LocalCa], Pem | None]] = {
    "without a certificate": lambda ca: None,
    "signed by itself": lambda ca: forge(),
    "of another CA": lambda ca: LocalCa.new().service(),
    "of another CA of the same name": lambda ca: forge(ca=LocalCa.new()),
    "expired": lambda ca: forge(ca=ca, valid_from=-3 * DAY, valid_to=-DAY),
    "of tomorrow": lambda ca: forge(ca=ca, valid_from=DAY, valid_to=2 * DAY),
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_a_stranger_does_not_get_in(directory: Path, ca: LocalCa, stranger: str) -> None:
    async with serving(Tls(directory)) as server:
        shown = STRANGERS[stranger](ca)

        assert await refusal(connect(server.address, ca.pem.certificate, shown)) is UNAVAILABLE


OTHERS: dict[str, Callable[[LocalCa], Pem]] = {
    "a tenant": lambda ca: ca.client("acme"),
    "the name as common name": lambda ca: forge((), ca=ca, common_name=MESH_NAME),
    "the name as a URI": lambda ca: forge([x509.UniformResourceIdentifier(MESH_NAME)], ca=ca),
    "the name as an address": lambda ca: forge([x509.RFC822Name(MESH_NAME)], ca=ca),
    "a wildcard": lambda ca: forge([x509.DNSName("*.mesh")], ca=ca),
    "a name below it": lambda ca: forge([x509.DNSName(f"evil.{MESH_NAME}")], ca=ca),
    "a name above it": lambda ca: forge([x509.DNSName(f"{MESH_NAME}.evil")], ca=ca),
    "no name": lambda ca: forge((), ca=ca),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_a_certificate_for_somebody_else_is_no_service(
    directory: Path, ca: LocalCa, other: str
) -> None:
    async with serving(Tls(directory)) as server:
        channel = connect(server.address, ca.pem.certificate, OTHERS[other](ca))
        async with channel:
            calls = [
                channel.unary_unary("/test.One/WhoAmI")(b"", timeout=TIMEOUT_S),
                channel.unary_stream("/test.One/Count")(b"", timeout=TIMEOUT_S).read(),
                health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=TIMEOUT_S),
            ]
            errors = await asyncio.gather(*calls, return_exceptions=True)

    for error in errors:
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is PERMISSION_DENIED
        assert MESH_NAME in str(error.details())


async def test_a_tenant_cannot_pose_as_a_service(
    tmp_path: Path, directory: Path, ca: LocalCa
) -> None:
    theirs = Tls(write(tmp_path / "theirs", ca.pem.certificate, ca.client("acme")), service=False)
    async with serving(theirs, for_callers=True) as server:
        assert await refusal(open_channel(server.address, Tls(directory))) is UNAVAILABLE


async def test_callers_need_no_certificate_where_they_have_keys(
    directory: Path, ca: LocalCa
) -> None:
    async with serving(Tls(directory), for_callers=True) as server:
        async with connect(server.address, ca.pem.certificate, None) as channel:
            assert await whoami(channel) == b""
        # Nobody asks, so that none is taken for anybody.
        async with connect(server.address, ca.pem.certificate, ca.client("acme")) as channel:
            assert await whoami(channel) == b""
        assert await refusal(open_channel(server.address)) is UNAVAILABLE


async def test_the_port_for_certificates_knows_callers_by_them(
    directory: Path, ca: LocalCa
) -> None:
    options = {"for_callers": True, "mtls_listen": "127.0.0.1:0"}
    async with serving(Tls(directory), **options) as server:
        assert server.mtls_address not in ("", server.address)
        tenant = ca.client("acme.example")
        async with connect(server.mtls_address, ca.pem.certificate, tenant) as channel:
            assert await whoami(channel) == b"acme.example"
        for stranger in STRANGERS.values():
            channel = connect(server.mtls_address, ca.pem.certificate, stranger(ca))
            assert await refusal(channel) is UNAVAILABLE


async def test_a_port_for_certificates_needs_tls() -> None:
    with pytest.raises(StartupError, match="use --tls-dir"):
        MeshServer("127.0.0.1:0", service_names=[], mtls_listen="127.0.0.1:0")


async def test_whoever_shows_nothing_is_not_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_MS", 200)
    async with serving(Tls(directory)) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""
        writer.close()


# Changing certificates, and the CA.


async def test_a_stream_outlives_its_ca_and_the_old_one_is_refused_from_then_on(
    directory: Path, ca: LocalCa, service: Pem
) -> None:
    tls = Tls(directory, check_interval_s=0)
    async with serving(tls) as server, Channels(tls) as channels:
        old: Any = channels.get(server.address)
        stream = old.unary_stream("/test.One/Count")(b"")
        assert await stream.read() == b"0"

        successor = LocalCa.new()
        write(directory, successor.pem.certificate, successor.service())
        new: Any = channels.get(server.address)

        assert new is not old
        assert await whoami(new)
        # He knows the new CA, and shows what the old one signed.
        late = connect(server.address, successor.pem.certificate, service)
        assert await refusal(late) is UNAVAILABLE
        # He has not heard of the new CA.
        assert await refusal(connect(server.address, ca.pem.certificate, service)) is UNAVAILABLE
        assert [await stream.read() for _ in range(3)] == [b"1", b"2", b"3"]
        stream.cancel()


async def test_two_cas_hold_while_one_follows_the_other(directory: Path, ca: LocalCa) -> None:
    tls = Tls(directory, check_interval_s=0)
    successor = LocalCa.new()
    both = ca.pem.certificate + successor.pem.certificate
    async with serving(tls) as server:
        replace(directory / CA_FILE, both)
        for each in (ca, successor):
            async with connect(server.address, ca.pem.certificate, each.service()) as channel:
                assert await whoami(channel)


async def test_a_server_with_a_broken_new_certificate_goes_on(directory: Path) -> None:
    tls = Tls(directory, check_interval_s=0)
    async with serving(tls) as server:
        replace(directory / CERTIFICATE_FILE, b"broken")
        channel: Any
        async with open_channel(server.address, tls) as channel:
            assert await whoami(channel)


async def test_channels_before_a_change_are_closed_after_their_time(
    directory: Path, ca: LocalCa
) -> None:
    tls = Tls(directory, check_interval_s=0)
    async with serving(tls) as server, Channels(tls, retired_for_s=0.05) as channels:
        old: Any = channels.get(server.address)
        await whoami(old)
        write(directory, ca.pem.certificate, ca.service())
        new: Any = channels.get(server.address)
        async with asyncio.timeout(TIMEOUT_S):
            while old.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                await asyncio.sleep(0.01)

        assert channels.get(server.address) is new
        assert await whoami(new)


async def test_channels_are_closed_with_those_before_a_change(directory: Path, ca: LocalCa) -> None:
    tls = Tls(directory, check_interval_s=0)
    async with asyncio.timeout(TIMEOUT_S), Channels(tls) as channels:
        old = channels.get("127.0.0.1:1")
        write(directory, ca.pem.certificate, ca.service())
        channels.get("127.0.0.1:1")
        await channels.close()
        await channels.close()

    assert old.get_state() is grpc.ChannelConnectivity.SHUTDOWN


# Without TLS.


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("", False),
        ("10.0.0.1", False),
        ("[::ffff:10.0.0.1]", False),
        ("127.0.0.1.evil.invalid", False),
    ],
)
def test_only_loopback_is_private(host: str, private: bool) -> None:
    assert is_loopback(host) is private
    require_private(f"{host}:7100", insecure=True)
    if private:
        require_private(f"{host}:7100", insecure=False)
    else:
        with pytest.raises(StartupError, match=r"--tls-dir DIR .* or say --insecure"):
            require_private(f"{host}:7100", insecure=False)


def test_an_address_without_a_port_is_not_blamed_on_tls() -> None:
    with pytest.raises(StartupError, match="must be host:port"):
        require_private("0.0.0.0", insecure=False)


@pytest.mark.parametrize(("mode", "is_said"), [(0o600, False), (0o644, True), (0o640, True)])
def test_a_key_that_others_can_read_is_said(
    directory: Path, caplog: pytest.LogCaptureFixture, mode: int, is_said: bool
) -> None:
    (directory / KEY_FILE).chmod(mode)

    Tls(directory)

    assert ("private key is not private" in caplog.messages) is is_said


@pytest.mark.parametrize(
    "module", ["services.control", "services.tokenizer", "kvstore", "worker", "router"]
)
async def test_a_process_does_not_open_itself_to_others_by_mistake(module: str) -> None:
    joined = () if module == "services.control" else ("--control", "127.0.0.1:1")
    status, _, errors = await run(module, *joined, "--listen", "0.0.0.0:0")

    assert status == 3
    assert "listening on 0.0.0.0:0 without TLS" in errors
    assert "--tls-dir DIR" in errors
    assert "--insecure" in errors
    assert len(errors.splitlines()) == 1


async def test_a_router_does_not_open_its_second_port_by_mistake() -> None:
    joined = ("--control", "127.0.0.1:1")
    status, _, errors = await run("router", *joined, "--operator-listen", "0.0.0.0:0")

    assert status == 3
    assert "listening on 0.0.0.0:0 without TLS" in errors


async def test_a_process_opens_itself_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("services.control", "--listen", "0.0.0.0:0", "--insecure") as node:
        assert node.address.startswith("0.0.0.0:")
    monkeypatch.setenv("FIRSTTOKEN_INSECURE", "1")
    async with running("services.control", "--listen", "0.0.0.0:0") as node:
        assert node.address.startswith("0.0.0.0:")


async def test_a_process_with_useless_files_says_why_in_one_line(directory: Path) -> None:
    (directory / KEY_FILE).unlink()
    status, _, errors = await run("services.control", "--tls-dir", str(directory))

    assert status == 3
    line = f"control: cannot read {directory / KEY_FILE}: No such file or directory"
    assert errors.splitlines() == [line]


# What is said of a handshake that fails.


async def test_it_is_said_what_keeps_a_caller_out(
    tmp_path: Path, directory: Path, ca: LocalCa, service: Pem
) -> None:
    tls = Tls(directory)
    other = LocalCa.new()
    stranger = Tls(write(tmp_path / "other", other.pem.certificate, other.service()))
    # Whom we trust, and who does not trust us.
    both = ca.pem.certificate + other.pem.certificate
    half = Tls(write(tmp_path / "half", both, other.service()))
    (tmp_path / "keyless").mkdir()
    replace(tmp_path / "keyless" / CA_FILE, ca.pem.certificate)
    keyless = Tls(tmp_path / "keyless", service=False)
    async with serving(tls) as server:
        assert await explain(server.address, tls) == ""
        assert "speaks TLS: use --tls-dir" in await explain(server.address, None)
        assert "does not hold by the CA in" in await explain(server.address, stranger)
        assert "refuses the certificate in" in await explain(server.address, half)
        assert "wants a certificate, and" in await explain(server.address, keyless)
    async with MeshServer("127.0.0.1:0", service_names=[]) as plain:
        assert await explain(plain.address, None) == ""
        assert "does not speak TLS" in await explain(plain.address, tls)
    for nobody in ("127.0.0.1:1", "no.such.host.invalid:1", "127.0.0.1:99999"):
        assert await explain(nobody, tls) == ""
        assert await explain(nobody, None) == ""


async def test_whoever_says_nothing_is_not_waited_for(directory: Path) -> None:
    connected = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        async with asyncio.timeout(TIMEOUT_S):
            assert await explain(f"{host}:{port}", Tls(directory)) == ""
        for writer in connected:
            writer.close()

"""Keys and certificates, as a caller outside of the mesh has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from firsttoken.client import MeshClient, MeshError
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from services.cli.local_ca import LocalCa
from services.runtime.server import MeshServer
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Tls
from tests.runtime.certificates import forge, write

LOOPBACK = "127.0.0.1:7100"
ELSEWHERE = "mesh.example:7100"


@pytest.fixture
def ca() -> LocalCa:
    return LocalCa.new()


@pytest.fixture
def directory(tmp_path: Path, ca: LocalCa) -> Path:
    return write(tmp_path / "tls", ca.pem.certificate, ca.service())


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    """Refuses every request with what it knows of the caller."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        metadata = dict(context.invocation_metadata())
        names = context.auth_context().get("peer_dns", ())
        said = f"{metadata.get('authorization')} {b','.join(names).decode()}"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, said)
        yield inference_pb2.GenerateResponse()

    async def Plan(
        self, request: inference_pb2.PlanRequest, context: Any
    ) -> inference_pb2.PlanResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "as a router of an older version")
        raise AssertionError


def make_server(directory: Path | None) -> MeshServer:
    tls = Tls(directory) if directory else None
    mtls_listen = "127.0.0.1:0" if directory else ""
    server = MeshServer(
        "127.0.0.1:0", service_names=[], tls=tls, for_callers=True, mtls_listen=mtls_listen
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Echo(), server.server)
    return server


async def said(client: MeshClient) -> str:
    async with client:
        with pytest.raises(MeshError) as caught:
            await client.complete("hi", deadline_s=10)
    if caught.value.code is not grpc.StatusCode.FAILED_PRECONDITION:
        return caught.value.code.name
    return caught.value.message


async def test_a_key_goes_along_as_a_bearer_token(directory: Path) -> None:
    ca_file = directory / CA_FILE
    async with make_server(directory) as server:
        client = MeshClient(server.address, api_key="ft-secret", ca_file=ca_file)
        assert await said(client) == "Bearer ft-secret "
        assert await said(MeshClient(server.address, ca_file=str(ca_file))) == "None "
    async with make_server(None) as server:
        assert await said(MeshClient(server.address, api_key="ft-secret")) == "Bearer ft-secret "


async def test_a_certificate_says_who_is_calling(
    directory: Path, ca: LocalCa, tmp_path: Path
) -> None:
    theirs = write(tmp_path / "theirs", ca.pem.certificate, ca.client("acme.example"))
    files: dict[str, Any] = {
        "ca_file": theirs / CA_FILE,
        "cert_file": theirs / CERTIFICATE_FILE,
        "key_file": theirs / KEY_FILE,
    }
    async with make_server(directory) as server:
        assert await said(MeshClient(server.mtls_address, **files)) == "None acme.example"
        without = MeshClient(server.mtls_address, ca_file=theirs / CA_FILE)
        assert await said(without) == "UNAVAILABLE"


async def test_a_router_of_another_ca_hears_no_key(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(LocalCa.new().pem.certificate)
    async with make_server(directory) as server:
        client = MeshClient(server.address, api_key="ft-secret", ca_file=other)
        assert await said(client) == "UNAVAILABLE"
        # gRPC's own list has no CA of ours.
        assert await said(MeshClient(server.address, tls=True)) == "UNAVAILABLE"


async def test_a_router_of_another_name_hears_no_key(
    ca: LocalCa, directory: Path, tmp_path: Path
) -> None:
    tenants = Tls(write(tmp_path / "its", ca.pem.certificate, forge(ca=ca)))
    server = MeshServer("127.0.0.1:0", service_names=[], tls=tenants, for_callers=True)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Echo(), server.server)
    ca_file = directory / CA_FILE
    async with server:
        # It has the name of the mesh, and neither an address nor another name.
        assert await said(MeshClient(server.address, ca_file=ca_file)) == "UNAVAILABLE"
        named = MeshClient(server.address, ca_file=ca_file, server_name="firsttoken.mesh")
        assert await said(named) == "None "
        misnamed = MeshClient(server.address, ca_file=ca_file, server_name="other.example")
        assert await said(misnamed) == "UNAVAILABLE"


@pytest.mark.parametrize(
    "address",
    [
        ELSEWHERE,
        "10.0.0.1:7100",
        "[2001:db8::1]:7100",
        "localhost.example:7100",
        "127.0.0.1.example:7100",
        "ipv4:127.0.0.1:7100,10.0.0.1:7100",
        "dns:///127.0.0.1.example:7100",
        "dns://10.0.0.1/localhost:7100",
        "7100",
    ],
)
def test_a_key_does_not_cross_the_network_unencrypted(address: str) -> None:
    with pytest.raises(ValueError, match="unencrypted: give ca_file"):
        MeshClient(address, api_key="ft-secret")
    MeshClient(address)
    MeshClient(address, api_key="ft-secret", insecure=True)
    MeshClient(address, api_key="ft-secret", tls=True)


@pytest.mark.parametrize("address", [LOOPBACK, "[::1]:7100", "localhost:7100", "unix:/run/mesh"])
def test_a_key_may_stay_on_this_machine_unencrypted(address: str) -> None:
    MeshClient(address, api_key="ft-secret")


@pytest.mark.parametrize("key", ["with space", "new\nline", "kéy", "a\x00b"])
def test_a_key_that_metadata_cannot_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must be printable ASCII"):
        MeshClient(LOOPBACK, api_key=key)


def test_a_certificate_and_its_key_go_together() -> None:
    with pytest.raises(ValueError, match="must be given together"):
        MeshClient(LOOPBACK, ca_file="ca.pem", cert_file="cert.pem")
    with pytest.raises(ValueError, match="must be given together"):
        MeshClient(LOOPBACK, ca_file="ca.pem", key_file="key.pem")


async def test_files_of_no_use_are_named_on_entering(directory: Path, ca: LocalCa) -> None:
    ca_file, cert_file, key_file = (
        directory / name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
    )
    with pytest.raises(FileNotFoundError, match=r"none\.pem"):
        await MeshClient(LOOPBACK, ca_file=directory / "none.pem").__aenter__()
    for content in (b"nonsense", b"\xff"):
        (directory / "bad.pem").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.pem holds no certificate in PEM"):
            await MeshClient(LOOPBACK, ca_file=directory / "bad.pem").__aenter__()
    key_file.write_bytes(ca.service().key)
    mismatched = MeshClient(LOOPBACK, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    with pytest.raises(ValueError, match=r"key\.pem are not a certificate and its key"):
        await mismatched.__aenter__()

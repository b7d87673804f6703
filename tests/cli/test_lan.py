"""Joining from another machine: the desk of `up --lan`, and who asks there."""

from __future__ import annotations

import argparse
import asyncio
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.cli import local_ca, worker
from services.cli.failures import Failure
from services.cli.invitation import JOIN_PORT, Invitation
from services.cli.lan import join_command, own_address
from services.cli.lan_desk import JoinDesk
from services.cli.lan_guest import Desk
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Tls
from tests.runtime.ports import free_port

HOST = "127.0.0.1"


@asynccontextmanager
async def desk_of(directory: Path) -> AsyncIterator[JoinDesk]:
    local_ca.complete(directory)
    async with JoinDesk(
        HOST, 0, directory=directory, control="10.0.0.1:7101", version="1", model="some"
    ) as desk:
        yield desk


def guest_of(desk: JoinDesk, invitation: Invitation | None = None) -> Desk:
    return Desk(HOST, int(desk.address.rpartition(":")[2]), invitation or desk.invitation)


async def test_who_shows_the_token_gets_a_certificate_of_the_mesh(tmp_path: Path) -> None:
    mesh, guest = tmp_path / "mesh", tmp_path / "guest"
    guest.mkdir()
    async with desk_of(mesh) as desk:
        invitation = Invitation.parse(desk.invitation.token)
        joined = await guest_of(desk, invitation).enroll(guest)

    assert joined[:3] == ("10.0.0.1:7101", "1", "some")
    assert abs(joined.skew_s) < 5
    assert Tls(guest).files.ca == (mesh / CA_FILE).read_bytes()
    assert (guest / KEY_FILE).read_bytes() != (mesh / KEY_FILE).read_bytes()
    for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
        assert stat.S_IMODE((guest / name).stat().st_mode) == 0o600


async def test_another_secret_gets_nothing(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        forged = desk.invitation._replace(secret=bytes(16))
        with pytest.raises(Failure, match="refuses this machine: the token is not of this run"):
            await guest_of(desk, forged).enroll(tmp_path / "nowhere")


async def test_nothing_is_sent_to_whom_the_token_does_not_name(tmp_path: Path) -> None:
    other = tmp_path / "other"
    local_ca.complete(other)
    received: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other / CERTIFICATE_FILE, other / KEY_FILE)
    server = await asyncio.start_server(listen, HOST, 0, ssl=context)
    async with server, desk_of(tmp_path / "mesh") as desk:
        between = Desk(HOST, server.sockets[0].getsockname()[1], desk.invitation)
        with pytest.raises(Failure, match=r"not who made the token.*Nothing was sent"):
            await between.enroll(tmp_path / "nowhere")
        while not received:  # it has hung up
            await asyncio.sleep(0.01)
    assert received == [b""]


async def test_a_machine_that_can_be_reached_is_let_in(tmp_path: Path) -> None:
    async with desk_of(tmp_path) as desk:
        await guest_of(desk).check_reachable(HOST, (free_port(), free_port()))


async def test_a_port_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    """The desk dials whoever asks; here he listens on another address than he asks from."""
    port = free_port()
    async with desk_of(tmp_path) as desk:
        with pytest.raises(Failure, match=f"cannot reach this machine.*port {port}: .*refused"):
            await guest_of(desk).check_reachable("127.0.0.2", (port,))


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Failure, match=f"cannot listen on {HOST}:{port}.*--port"):
            await Desk(HOST, 1, Invitation(bytes(16), bytes(32))).check_reachable(HOST, (port,))


async def test_where_nobody_listens_is_said(tmp_path: Path) -> None:
    desk = Desk(HOST, free_port(), Invitation(bytes(16), bytes(32)))
    with pytest.raises(Failure, match=r"nothing listens at .*up --lan"):
        await desk.enroll(tmp_path)


async def test_what_is_no_desk_is_said(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    async with server:
        desk = Desk(HOST, server.sockets[0].getsockname()[1], Invitation(bytes(16), bytes(32)))
        with pytest.raises(Failure, match=r"is no `firsttoken up --lan`"):
            await desk.enroll(tmp_path)


@pytest.mark.parametrize("request_line", [b"{}\n", b"[]\n", b"no JSON\n", b"x" * 100_000])
async def test_what_is_no_request_is_survived(tmp_path: Path, request_line: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with desk_of(tmp_path) as desk:
        port = int(desk.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        writer.write(request_line)
        assert b"certificate" not in await reader.read()
        writer.close()
        await guest_of(desk).enroll(tmp_path)


@pytest.mark.parametrize("token", ["", "short", "A" * 63 + "!", "Ä" * 64, "A" * 68])
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(Failure, match=r"--token.*copy the whole command"):
        Invitation.parse(token)


def test_a_request_that_is_not_for_a_certificate_is_not_signed(tmp_path: Path) -> None:
    local_ca.complete(tmp_path)
    with pytest.raises(ValueError, match="PEM"):
        local_ca.LocalCa.read(tmp_path).sign_service(b"no request")


def test_the_command_names_a_port_that_is_not_the_usual_one() -> None:
    assert join_command(f"10.0.0.1:{JOIN_PORT}", "T") == (
        "firsttoken worker --join 10.0.0.1 --token T"
    )
    assert "--join 10.0.0.1:9 " in join_command("10.0.0.1:9", "T")


def test_a_machine_knows_its_address_on_the_way_to_another() -> None:
    assert own_address(HOST, 9) == HOST
    with pytest.raises(Failure, match=r"no way to nobody\.invalid"):
        own_address("nobody.invalid", 9)


@pytest.mark.parametrize(("text", "place"), [
    ("desk", ("desk", JOIN_PORT)), ("10.0.0.1:9", ("10.0.0.1", 9)), ("[::1]", ("::1", JOIN_PORT)),
    ("[::1]:9", ("::1", 9)),
])  # fmt: skip
def test_a_place_is_a_host_and_perhaps_a_port(text: str, place: tuple[str, int]) -> None:
    assert worker._place(text) == place


@pytest.mark.parametrize("text", ["", ":9", "::1", "desk:", "desk:0", "desk:70000"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        worker._place(text)


def test_clocks_that_differ_by_more_than_a_second_are_told() -> None:
    assert worker.describe_skew(0.9, "desk") == ""
    assert "2.0 s ahead of the one at desk" in worker.describe_skew(2.0, "desk")
    assert "2.0 s behind the one at desk" in worker.describe_skew(-2.0, "desk")

"""Asking to join a mesh on another machine: what `firsttoken worker --join` does first."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.cli import local_ca
from services.cli.failures import CANNOT_START, Failure
from services.cli.invitation import Invitation, pin_of
from services.cli.lan_desk import MAX_LINE_BYTES, TIMEOUT_S
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE

# Tickets hold for a second: beyond this, workers refuse them (docs/security.md).
MAX_SKEW_S = 1.0


class Joined(NamedTuple):
    """`skew_s`: by how much this machine's clock is ahead of the mesh's, as far as one can tell."""

    control: str
    version: str
    model: str
    skew_s: float


class Desk(NamedTuple):
    """The other machine's JoinDesk. Every method raises Failure, which says what is wrong."""

    host: str
    port: int
    invitation: Invitation

    async def enroll(self, directory: Path) -> Joined:
        """Put into `directory` what a worker of the mesh needs. The key never leaves it."""
        key, request = local_ca.make_request()
        asked_s = time.time()
        answer = await self._ask({"request": request.decode()})
        middle_s = (asked_s + time.time()) / 2
        write_private(directory / KEY_FILE, key)
        write_private(directory / CERTIFICATE_FILE, answer["certificate"].encode())
        write_private(directory / CA_FILE, answer["ca"].encode())
        return Joined(
            answer["control"], answer["version"], answer["model"], middle_s - answer["now_s"]
        )

    async def check_reachable(self, address: str, ports: Sequence[int]) -> None:
        """Listens on the ports meanwhile: nobody else may."""
        with _listening(address, ports):
            answer = await self._ask({"ports": list(ports)})
        if answer["problems"]:
            said = "; ".join(f"port {port}: {why}" for port, why in answer["problems"].items())
            raise _failure(
                f"the mesh at {self.host} cannot reach this machine ({address}): {said}; let TCP"
                f" ports {', '.join(map(str, ports))} through the firewall here, or choose others"
                " with --port"
            )

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        where = f"{self.host}:{self.port}"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # The pin below says who it is: no name, and no authority that this machine knows.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    self.host, self.port, ssl=context, limit=MAX_LINE_BYTES
                )
                try:
                    self._require_pinned(writer, where)
                    secret = self.invitation.secret.hex()
                    writer.write(json.dumps({**request, "secret": secret}).encode() + b"\n")
                    answer = json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError) as error:
            raise _failure(_why(where, error)) from None
        if problem := answer.get("error"):
            raise _failure(f"{where} refuses this machine: {problem}")
        return dict(answer)

    def _require_pinned(self, writer: asyncio.StreamWriter, where: str) -> None:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(pin_of(shown), self.invitation.pin):
            raise _failure(
                f"what answers at {where} is not who made the token: its certificate is another"
                " one. Nothing was sent. Use the command that `firsttoken up --lan` prints there"
                " now; if it is that one, somebody is in between"
            )


def write_private(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _why(where: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return (
            f"{where} does not answer: is it the right machine, is it on, and does its firewall"
            " let this port through?"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {where}: is `firsttoken up --lan` running there, on this port?"
    if isinstance(error, ssl.SSLError):
        return f"what answers at {where} is no `firsttoken up --lan`: it does not speak TLS so"
    if isinstance(error, socket.gaierror):
        return f"no machine of the name in {where} is known here: {error.strerror}"
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else error
        return f"cannot reach {where}: {reason}"
    return f"what answers at {where} is no `firsttoken up --lan`"


@contextlib.contextmanager
def _listening(address: str, ports: Sequence[int]) -> Iterator[None]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        for port in ports:
            listening = stack.enter_context(socket.socket(family))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((address, port))
            except OSError as error:
                raise _failure(
                    f"cannot listen on {address}:{port}: {error.strerror}; choose another port"
                    " with --port"
                ) from None
            listening.listen()
        yield


def _failure(message: str) -> Failure:
    return Failure(message, exit_status=CANNOT_START)

"""Where machines of the local network ask to join: `firsttoken up --lan`.

Each connection is TLS and carries one request and one answer, a line of JSON each. Whoever
shows the secret has his key's certificate signed, or is told whether he can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import ssl
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from services.cli.failures import CANNOT_START, Failure
from services.cli.invitation import Invitation
from services.cli.local_ca import LocalCa
from services.runtime.startup import MAX_PORT
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE

MAX_LINE_BYTES = 1 << 14
TIMEOUT_S = 10.0
# A firewall that says nothing is taken for one after so long.
DIAL_TIMEOUT_S = 2.0
MAX_PORTS = 4


class JoinDesk:
    """An async context manager that serves. `directory`: the mesh's TLS files, and its CA's key."""

    def __init__(
        self, host: str, port: int, *, directory: Path, control: str, version: str, model: str
    ) -> None:
        self._host, self._port = host, port
        self._ca = LocalCa.read(directory)
        self._ca_pem = (directory / CA_FILE).read_text()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
        pem = (directory / CERTIFICATE_FILE).read_text()
        self.invitation = Invitation.new(ssl.PEM_cert_to_DER_cert(_first(pem)))
        self._told = {"control": control, "version": version, "model": model}
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> JoinDesk:
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, ssl=self._context, limit=MAX_LINE_BYTES
            )
        except OSError as error:
            raise Failure(
                f"cannot listen on {self._host}:{self._port}: {error.strerror};"
                " choose another port with --join-port",
                exit_status=CANNOT_START,
            ) from None
        self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever breaks off, or sends what is no request, has himself to blame.
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(TIMEOUT_S):
                peer = str(writer.get_extra_info("peername")[0])
                answer = await self._answer(json.loads(await reader.readline()), peer)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _answer(self, request: Any, peer: str) -> dict[str, Any]:
        if not isinstance(request, dict) or not self._knows(request.get("secret")):
            return {"error": "the token is not of this run of `firsttoken up --lan`"}
        if "ports" in request:
            return {"problems": await self._dial(peer, request["ports"])}
        if "request" in request:
            try:
                certificate = self._ca.sign_service(str(request["request"]).encode())
            except ValueError:
                return {"error": "the request is not for a certificate"}
            signed = {"certificate": certificate.decode(), "ca": self._ca_pem}
            return {**self._told, **signed, "now_s": time.time()}
        return {**self._told, "now_s": time.time()}

    def _knows(self, secret: object) -> bool:
        known = self.invitation.secret.hex().encode()
        return isinstance(secret, str) and hmac.compare_digest(secret.encode(), known)

    async def _dial(self, peer: str, ports: Any) -> dict[str, str]:
        """By port, why he that asks cannot be reached on it. Nobody else is dialled."""
        if not isinstance(ports, list) or len(ports) > MAX_PORTS or not all(map(_is_port, ports)):
            raise ValueError(ports)
        problems = await asyncio.gather(*(_why_unreachable(peer, port) for port in ports))
        return {str(p): problem for p, problem in zip(ports, problems, strict=True) if problem}


def _is_port(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= MAX_PORT


async def _why_unreachable(host: str, port: int) -> str:
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"nothing came back within {DIAL_TIMEOUT_S:g} s: a firewall drops it"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)  # not asyncio's words
    writer.close()
    return ""


def _first(pem: str) -> str:
    """Of a chain, the certificate itself."""
    end = "-----END CERTIFICATE-----"
    return pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)] + "\n"

"""firsttoken probe: whether a process serves, for health checks.

They run all the time, beside what must be fast: without gRPC, which takes longer to import
than all of this takes.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import NamedTuple

from services.cli.failures import Failure
from services.runtime.startup import MAX_PORT

TIMEOUT_S = 3.0
MAX_ANSWER_BYTES = 1 << 20

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_STREAM = 1
_SEVEN_BITS = 0x7F
# A gRPC message: not compressed, its length, HealthCheckResponse(status=SERVING).
_SERVING = b"\x00\x00\x00\x00\x02\x08\x01"


class Target(NamedTuple):
    """`path` is None for gRPC's health."""

    host: str
    port: int
    path: str | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        type=_target,
        metavar="HOST:PORT|http://HOST:PORT/PATH",
        help="a process of the mesh, asked for its gRPC health, or a URL that answers 2xx",
    )
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get("FIRSTTOKEN_TLS_DIR") or None,
        metavar="DIR",
        help="ca.pem, cert.pem and key.pem for TLS (default: FIRSTTOKEN_TLS_DIR; else no TLS)",
    )


def run(arguments: argparse.Namespace) -> int:
    """0 when it serves. Raises Failure."""
    target: Target = arguments.target
    try:
        with _connect(target, arguments.tls_dir) as connection:
            if target.path is not None:
                problem = _ask_http(connection, target)
            else:
                problem = _ask_grpc(connection, target, secure=arguments.tls_dir is not None)
    except OSError as error:  # a time-out too
        raise Failure(f"{target.address}: {error.strerror or error}") from None
    except UnicodeError:  # a label of a name is too long, or empty
        raise Failure(f"{target.address}: no such host") from None
    if problem:
        raise Failure(f"{target.address} {problem}")
    return 0


def _target(text: str) -> Target:
    place, slash, path = text.removeprefix("http://").partition("/")
    host, _, port = place.rpartition(":")
    is_url = text.startswith("http://")
    is_port = port.isascii() and port.isdecimal() and int(port[:6]) <= MAX_PORT
    if not (host and is_port) or (slash and not is_url):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT or an http:// URL; got {text!r}")
    return Target(host.strip("[]"), int(port), f"/{path}" if is_url else None)


def _connect(target: Target, tls_dir: Path | None) -> socket.socket:
    connection = socket.create_connection((target.host, target.port), TIMEOUT_S)
    if tls_dir is None or target.path is not None:
        return connection
    import ssl

    from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, MESH_NAME

    context = ssl.create_default_context(cafile=tls_dir / CA_FILE)
    # Newer Pythons ask of certificates what gRPC does not.
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
    context.load_cert_chain(tls_dir / CERTIFICATE_FILE, tls_dir / KEY_FILE)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(connection, server_hostname=MESH_NAME)


def _ask_http(connection: socket.socket, target: Target) -> str:
    """What is wrong; "" when nothing is."""
    request = f"GET {target.path} HTTP/1.1\r\nhost: {target.address}\r\nconnection: close\r\n\r\n"
    connection.sendall(request.encode())
    with connection.makefile("rb") as answer:
        status = answer.readline(1024).split(b" ")
    if len(status) < 2 or not status[0].startswith(b"HTTP/"):
        return "does not speak HTTP"
    return "" if status[1].startswith(b"2") else f"answers {status[1].decode(errors='replace')}"


def _ask_grpc(connection: socket.socket, target: Target, *, secure: bool) -> str:
    """grpc.health.v1.Health/Check with an empty request, the least of HTTP/2 that does it."""
    connection.sendall(
        _PREFACE
        + _frame(_SETTINGS, 0, 0)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, _headers(target.address, secure=secure))
        + _frame(_DATA, _END_STREAM, _STREAM, bytes(5))
    )
    answer, num_bytes = b"", 0
    with connection.makefile("rb") as stream:
        while num_bytes < MAX_ANSWER_BYTES and len(head := stream.read(9)) == 9:
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            num_bytes += length
            payload = stream.read(length)
            if kind == _DATA:
                answer += payload
            if kind in (_RST_STREAM, _GOAWAY):
                break
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                return "" if answer == _SERVING else "does not serve"
    return "does not speak gRPC"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def _headers(authority: str, *, secure: bool) -> bytes:
    """HPACK, without compression: names and, of two, the values by their static index."""
    return b"".join(
        (
            b"\x83",  # :method POST
            b"\x87" if secure else b"\x86",  # :scheme
            b"\x04" + _string("/grpc.health.v1.Health/Check"),  # :path
            b"\x01" + _string(authority),  # :authority
            b"\x0f\x10" + _string("application/grpc"),  # content-type
            b"\x00" + _string("te") + _string("trailers"),
        )
    )


def _string(text: str) -> bytes:
    """Its length in seven bits; of a longer one, what is beyond them behind, seven at a time."""
    data = text.encode()
    if len(data) < _SEVEN_BITS:
        return bytes((len(data),)) + data
    length, beyond = bytearray((_SEVEN_BITS,)), len(data) - _SEVEN_BITS
    while beyond > _SEVEN_BITS:
        length.append(beyond & _SEVEN_BITS | 0x80)
        beyond >>= 7
    return bytes((*length, beyond)) + data

"""Why no call gets through, as far as a handshake of our own can tell."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from services.runtime.tls import CERTIFICATE_FILE, KEY_FILE, MESH_NAME, TLS_DIR_VARIABLE, Tls

TIMEOUT_S = 2.0
# What an HTTP/2 client says first. A server answers with its settings, and gRPC's hangs up
# without a word on a certificate that it refuses.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


async def explain(address: str, tls: Tls | None) -> str:
    """One line; "" when nobody answers at `address`, or nothing is wrong with its TLS."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            speaks_tls = await _speaks_tls(host, int(port))
            if tls is None:
                return _needs_tls(address) if speaks_tls else ""
            if not speaks_tls:
                return (
                    f"what answers at {address} does not speak TLS: leave --tls-dir"
                    f" ({TLS_DIR_VARIABLE}) away, or start it with TLS"
                )
            return await _refusal(host, int(port), address, tls)
    except (OSError, ValueError, OverflowError):  # TimeoutError is an OSError
        return ""


def _needs_tls(address: str) -> str:
    return f"what answers at {address} speaks TLS: use --tls-dir DIR ({TLS_DIR_VARIABLE})"


async def _speaks_tls(host: str, port: int) -> bool:
    """Raises OSError when nobody answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, plain = await asyncio.open_connection(host, port)
    plain.close()
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:  # it hung up on what it did not understand
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _refusal(host: str, port: int, address: str, tls: Tls) -> str:
    context = ssl.create_default_context(cadata=tls.files.ca.decode())
    # Newer Pythons ask of certificates what gRPC does not.
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
    context.set_alpn_protocols(["h2"])
    if tls.files.certificate:
        context.load_cert_chain(tls.directory / CERTIFICATE_FILE, tls.directory / KEY_FILE)
    try:
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=MESH_NAME
        )
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of what answers at {address} does not hold by the CA in"
            f" {tls.directory}: {error.verify_message}"
        )
    except ssl.SSLError:
        return _refused(address, tls)
    try:
        writer.write(_PREFACE)
        await reader.readexactly(1)
    except (OSError, asyncio.IncompleteReadError):
        return _refused(address, tls)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return ""


def _refused(address: str, tls: Tls) -> str:
    if not tls.files.certificate:
        return f"what answers at {address} wants a certificate, and {tls.directory} has none"
    return f"what answers at {address} refuses the certificate in {tls.directory}"

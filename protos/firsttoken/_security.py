"""How a client proves who it is, and knows whom it speaks to."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path
from typing import NamedTuple, TypeAlias

import grpc

File: TypeAlias = str | Path | None


class TlsOptions(NamedTuple):
    """As MeshClient takes them. TLS is used when one is set."""

    tls: bool = False
    ca_file: File = None
    cert_file: File = None
    key_file: File = None
    server_name: str | None = None

    @property
    def enabled(self) -> bool:
        return any(self)

    def check(self) -> None:
        """Raises ValueError for files that make no sense together."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must be given together")

    def read(self) -> grpc.ChannelCredentials:
        """Raises OSError, or ValueError for a file that does not hold what it should."""
        context = ssl.create_default_context()
        ca = certificate = key = None
        if self.ca_file is not None:
            ca = Path(self.ca_file).read_bytes()
            try:
                context.load_verify_locations(cadata=ca.decode())
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(f"{self.ca_file} holds no certificate in PEM") from error
        if self.cert_file is not None and self.key_file is not None:
            certificate = Path(self.cert_file).read_bytes()
            key = Path(self.key_file).read_bytes()
            try:
                # An encrypted key would ask on the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(
                    f"{self.cert_file} and {self.key_file} are not a certificate and its key:"
                    f" {error}"
                ) from error
        return grpc.ssl_channel_credentials(ca, key, certificate)


def check_key(api_key: str, address: str, *, encrypted: bool, insecure: bool) -> None:
    """Raises ValueError for a key that cannot be sent, or must not be."""
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ValueError("api_key must be printable ASCII without spaces")
    if not (encrypted or insecure or is_loopback(address)):
        raise ValueError(
            f"api_key would cross the network to {address} unencrypted: give ca_file (or"
            " tls=True), or accept it with insecure=True"
        )


def is_loopback(address: str) -> bool:
    """Whether host:port, as it is written, is on this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_password() -> str:
    raise ValueError("the key must not be encrypted")

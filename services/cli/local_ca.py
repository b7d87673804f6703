"""A certificate authority on this machine, for a mesh of one's own.

ca.pem, cert.pem and key.pem are what every process of the mesh is given (--tls-dir);
ca-key.pem is who may make more certificates. Keys are readable by their owner alone.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.cli.failures import CANNOT_START, Failure
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, MESH_NAME

CA_KEY_FILE = "ca-key.pem"
CA_DAYS = 3650
CERTIFICATE_DAYS = 365
# Clocks of machines differ.
BACKDATED = datetime.timedelta(minutes=5)

Key: TypeAlias = ec.EllipticCurvePrivateKey
PublicKey: TypeAlias = ec.EllipticCurvePublicKey

_SERVICE_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Pem(NamedTuple):
    """A certificate and its private key."""

    certificate: bytes
    key: bytes


class LocalCa:
    """What signs certificates: its own certificate and key."""

    def __init__(self, certificate: x509.Certificate, key: Key) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def new(cls, name: str = "firsttoken local CA") -> LocalCa:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(name)
        made = (
            _begin(subject, subject, key.public_key(), days=CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_ca_usage(), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(made, key)

    @classmethod
    def read(cls, directory: Path) -> LocalCa:
        """Raises Failure, which names the file."""
        certificate_file, key_file = directory / CA_FILE, directory / CA_KEY_FILE
        try:
            # While one CA follows another, ca.pem has both: the first signs.
            certificate = x509.load_pem_x509_certificates(certificate_file.read_bytes())[0]
            key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        except FileNotFoundError as error:
            raise _failure(
                f"{error.filename} is not there: without it {directory} makes no certificates"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise _failure(f"cannot use the CA in {directory}: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise _failure(f"{key_file} is no key of an elliptic curve, as `up --tls` makes it")
        if key.public_key() != certificate.public_key():
            raise _failure(f"{key_file} is not the key of {certificate_file}")
        return cls(certificate, key)

    @property
    def pem(self) -> Pem:
        return Pem(self._certificate.public_bytes(serialization.Encoding.PEM), _to_pem(self._key))

    def service(self, *, days: int = CERTIFICATE_DAYS) -> Pem:
        """For the processes of the mesh, and for who operates it."""
        return self._issue(MESH_NAME, _service_names(), _SERVICE_USAGES, days)

    def sign_service(self, request: bytes, *, days: int = CERTIFICATE_DAYS) -> bytes:
        """A service's certificate for the key in `request` (PEM), whatever else that asks for.

        Raises ValueError where it is no such request.
        """
        read = x509.load_pem_x509_csr(request)
        key = read.public_key()
        if not read.is_signature_valid or not isinstance(key, PublicKey):
            raise ValueError("not signed with an elliptic curve's key")
        return self._sign(key, MESH_NAME, _service_names(), _SERVICE_USAGES, days)

    def client(self, name: str, *, days: int = CERTIFICATE_DAYS) -> Pem:
        """For a tenant: `name` is what `tenants.NAME.identities` has. It serves nothing."""
        if name.rstrip(".").casefold() == MESH_NAME:
            raise _failure(f"{name} is the name of the mesh's own services")
        try:
            names = [x509.DNSName(name)]
        except ValueError:
            raise _failure(
                f"a certificate's name is ASCII, as in a DNS name; got {name!r}"
            ) from None
        return self._issue(name, names, [ExtendedKeyUsageOID.CLIENT_AUTH], days)

    def _issue(
        self,
        name: str,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        days: int,
    ) -> Pem:
        key = ec.generate_private_key(ec.SECP256R1())
        return Pem(self._sign(key.public_key(), name, names, usages, days), _to_pem(key))

    def _sign(
        self,
        key: PublicKey,
        name: str,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        days: int,
    ) -> bytes:
        certificate = (
            _begin(_subject(name), self._certificate.subject, key, days=days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def make_request() -> tuple[bytes, bytes]:
    """A new key, and the request that it be signed, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(MESH_NAME))
    request = builder.sign(key, hashes.SHA256())
    return _to_pem(key), request.public_bytes(serialization.Encoding.PEM)


def complete(directory: Path) -> None:
    """Make what is missing among ca.pem, cert.pem and key.pem; leave what is there.

    Raises Failure where that cannot be: a CA without its key signs nothing.
    """
    ca_file, ca_key_file = directory / CA_FILE, directory / CA_KEY_FILE
    certificate_file, key_file = directory / CERTIFICATE_FILE, directory / KEY_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not ca_file.exists() and not ca_key_file.exists():
            _require_absent(certificate_file, key_file, because=f"there is no {ca_file}")
            made = LocalCa.new().pem
            _write_new(ca_key_file, made.key, mode=0o600)
            _write_new(ca_file, made.certificate, mode=0o644)
        if not certificate_file.exists() and not key_file.exists():
            made = LocalCa.read(directory).service()
            _write_new(key_file, made.key, mode=0o600)
            _write_new(certificate_file, made.certificate, mode=0o644)
    except OSError as error:
        raise _failure(f"cannot write to {directory}: {error.strerror}") from None


def make_client_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate for tenant `name`, signed by the CA in `directory`: its file and its key's.

    Raises Failure: there is no such CA, or these files are there already.
    """
    made = LocalCa.read(directory).client(name)
    stem = name.replace("/", "_").lstrip(".") or "client"
    certificate_file, key_file = directory / f"{stem}.pem", directory / f"{stem}-key.pem"
    _require_absent(certificate_file, key_file, because="it would be written over")
    try:
        _write_new(key_file, made.key, mode=0o600)
        _write_new(certificate_file, made.certificate, mode=0o644)
    except OSError as error:
        raise _failure(f"cannot write to {directory}: {error.strerror}") from None
    return certificate_file, key_file


def _begin(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _service_names() -> list[x509.GeneralName]:
    addresses = (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"))
    return [
        *(x509.DNSName(name) for name in (MESH_NAME, "localhost")),
        *(x509.IPAddress(address) for address in addresses),
    ]


def _subject(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError:
        raise _failure(f"a certificate's name has 1 to 64 characters; got {name!r}") from None


def _ca_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )


def _to_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_new(path: Path, content: bytes, *, mode: int) -> None:
    """Whole or not at all, and never over another file."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
        os.link(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _require_absent(*paths: Path, because: str) -> None:
    for path in paths:
        if path.exists():
            raise _failure(f"{path} is there already, and {because}")


def _failure(message: str) -> Failure:
    return Failure(message, exit_status=CANNOT_START)

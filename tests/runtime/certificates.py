"""Certificates as an operator and as an attacker have them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from services.cli.local_ca import LocalCa, Pem
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, MESH_NAME

DAY = datetime.timedelta(days=1)


def write(directory: Path, ca: bytes, pem: Pem) -> Path:
    """As --tls-dir wants it."""
    directory.mkdir(parents=True, exist_ok=True)
    replace(directory / CA_FILE, ca)
    replace(directory / KEY_FILE, pem.key)
    replace(directory / CERTIFICATE_FILE, pem.certificate)
    return directory


def replace(path: Path, content: bytes) -> None:
    """At once, as a careful operator does."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.chmod(0o600)
    new.replace(path)


def forge(
    names: Sequence[x509.GeneralName] = (x509.DNSName(MESH_NAME),),
    *,
    ca: LocalCa | None = None,
    common_name: str = "nobody",
    valid_from: datetime.timedelta = -DAY,
    valid_to: datetime.timedelta = DAY,
) -> Pem:
    """One of `ca`, or signed by itself, with whatever is asked for."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    issuer, signer = subject, key
    if ca is not None:
        issuer = x509.load_pem_x509_certificate(ca.pem.certificate).subject
        loaded = serialization.load_pem_private_key(ca.pem.key, None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer = loaded
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + valid_from)
        .not_valid_after(now + valid_to)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    return Pem(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )

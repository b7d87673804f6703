"""What must hold for a process's certificate, key and CA, and the names in them."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from services.runtime.logs import event
from services.runtime.startup import StartupError
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsFiles

# From then on a start says how long is left.
SOON = datetime.timedelta(days=14)

logger = logging.getLogger(__name__)


def check_files(files: TlsFiles, directory: Path, *, needed_name: str = "") -> None:
    """Raises StartupError, which names the file: a pair that could not work is no pair.

    `needed_name`: a DNS name that the certificate must have.
    """
    now = datetime.datetime.now(datetime.UTC)
    ca_path = directory / CA_FILE
    authorities = _parse(files.ca, ca_path)
    valid = [each for each in authorities if _problem(each, now) is None]
    if not valid:
        raise StartupError(f"{ca_path} {_problem(authorities[0], now)}")
    if not files.certificate:
        return
    path = directory / CERTIFICATE_FILE
    chain = _parse(files.certificate, path)
    problem = _problem(chain[0], now)
    if problem is not None:
        raise StartupError(f"{path} {problem}")
    _check_key(files.key, directory / KEY_FILE, chain[0], path)
    if not _leads_to(chain, valid):
        raise StartupError(f"{path} is not signed by a CA in {ca_path}")
    if needed_name and needed_name not in dns_names(chain[0]):
        raise StartupError(
            f"{path} lacks the DNS name {needed_name}, by which the mesh's processes know"
            " each other"
        )
    left = chain[0].not_valid_after_utc - now
    if left < SOON:
        event(logger, logging.WARNING, "certificate expires soon", file=str(path), days=left.days)


def dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.value.get_values_for_type(x509.DNSName)


def _parse(pem: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise StartupError(f"{path} holds no certificate in PEM: {error}") from error


def _problem(certificate: x509.Certificate, now: datetime.datetime) -> str | None:
    if now >= certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        return f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return None


def _check_key(
    pem: bytes, key_path: Path, certificate: x509.Certificate, certificate_path: Path
) -> None:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:  # it is encrypted
        raise StartupError(f"{key_path} must not be encrypted") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise StartupError(f"{key_path} holds no private key in PEM: {error}") from error
    if key.public_key() != certificate.public_key():
        raise StartupError(f"{key_path} is not the key of {certificate_path}")


def _leads_to(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> bool:
    """Each is signed by the next, and the last by an authority."""
    for certificate, following in zip(chain, (*chain[1:], None), strict=True):
        if any(_signed(certificate, authority) for authority in authorities):
            return True
        if following is None or not _signed(certificate, following):
            return False
    return False


def _signed(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True

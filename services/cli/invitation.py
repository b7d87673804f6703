"""What lets a machine of the local network join: a secret, and whom to show it to."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from typing import NamedTuple

from services.cli.failures import CANNOT_START, Failure

JOIN_PORT = 7102
TOKEN_VARIABLE = "FIRSTTOKEN_JOIN_TOKEN"
SECRET_BYTES, PIN_BYTES = 16, 32


class Invitation(NamedTuple):
    """`pin`: SHA-256 of the certificate (DER) of who made it. Nobody else is told the secret."""

    secret: bytes
    pin: bytes

    @classmethod
    def new(cls, certificate: bytes) -> Invitation:
        return cls(secrets.token_bytes(SECRET_BYTES), pin_of(certificate))

    @classmethod
    def parse(cls, token: str) -> Invitation:
        """Raises Failure."""
        try:
            raw = base64.b64decode(token, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != SECRET_BYTES + PIN_BYTES:
            raise Failure(
                "--token: not as `firsttoken up --lan` prints it; copy the whole command",
                exit_status=CANNOT_START,
            )
        return cls(raw[:SECRET_BYTES], raw[SECRET_BYTES:])

    @property
    def token(self) -> str:
        return base64.urlsafe_b64encode(self.secret + self.pin).decode()


def pin_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()

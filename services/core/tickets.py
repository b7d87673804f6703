"""Keys that sign, known to some processes of the mesh and to nobody else. Pure.

All control replicas derive the same keys from one secret and the time. The next key is told
before anybody signs with it, and the last one for as long again: so no process needs to hear
of a change at the same moment as another.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from typing import NamedTuple

SECRET_BYTES = 32


class SigningKey(NamedTuple):
    id: str
    secret: bytes


class KeyRing(NamedTuple):
    """Signatures by any of `keys` are good; `current_id` names the one to sign with."""

    keys: tuple[SigningKey, ...] = ()
    current_id: str = ""

    @property
    def can_sign(self) -> bool:
        return any(key.id == self.current_id for key in self.keys)

    def sign(self, data: bytes) -> bytes:
        """By the current key. Raises LookupError where there is none."""
        return _sign(self._secret(self.current_id), data)

    def verifies(self, data: bytes, key_id: str, signature: bytes) -> bool:
        """Raises LookupError for a key that is not, or no longer, known."""
        return hmac.compare_digest(_sign(self._secret(key_id), data), signature)

    def _secret(self, key_id: str) -> bytes:
        for key in self.keys:
            if key.id == key_id:
                return key.secret
        raise LookupError(key_id)


class KeyMemory:
    """Keys that are no longer told, for as long as what they signed may come back."""

    def __init__(self) -> None:
        self._ring = KeyRing()
        self._gone: deque[tuple[float, SigningKey]] = deque()

    def recall(self, ring: KeyRing, now_s: float, kept_s: float) -> KeyRing:
        """`ring`, as it is told now, with those that were in earlier ones."""
        if ring != self._ring:
            gone = (key for key in self._ring.keys if key not in ring.keys)
            self._gone.extend((now_s, key) for key in gone)
            self._ring = ring
        while self._gone and self._gone[0][0] < now_s - kept_s:
            self._gone.popleft()
        if not self._gone:
            return ring
        return ring._replace(keys=(*ring.keys, *(key for _, key in self._gone)))


def derive_ring(secret: bytes, now_s: float, lifetime_s: float) -> KeyRing:
    """`now_s`: Unix time. Each key is the current one for `lifetime_s`."""
    number = int(now_s // lifetime_s)
    previous, current, following = (_derive(secret, number + step) for step in (-1, 0, 1))
    return KeyRing((previous, current, following), current.id)


def next_change_s(now_s: float, lifetime_s: float) -> float:
    """When `derive_ring` gives another one, in Unix time."""
    return (now_s // lifetime_s + 1) * lifetime_s


def _derive(secret: bytes, number: int) -> SigningKey:
    derived = _sign(secret, b"firsttoken ticket key %d" % number)
    # Of another secret it is another key, and must not go by the same name.
    name = hashlib.sha256(derived).hexdigest()[:8]
    return SigningKey(f"{number}-{name}", derived)


def _sign(secret: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, data, "sha256")

"""Who a caller is. Pure: from credentials to a tenant, by the configuration."""

from __future__ import annotations

import hashlib
import secrets
from typing import NamedTuple

from services.core.settings import MeshConfig, TenantSettings

KEY_PREFIX = "ft-"
KEY_BYTES = 32
HASH_PREFIX = "sha256:"


class Tenant(NamedTuple):
    name: str
    settings: TenantSettings


# Everybody, while no tenant is configured.
ANYBODY = Tenant("", TenantSettings())


class Tenants:
    """All of one configuration, to be asked per request."""

    def __init__(self, config: MeshConfig) -> None:
        self._by_credential = {
            credential: Tenant(name, settings)
            for name, settings in config.tenants.items()
            for credential in (*settings.key_hashes.split(), *settings.identities.split())
        }
        # There is somebody to tell from others, or nobody may come in.
        self.required = bool(config.tenants) or config.router.require_credentials

    def by_key(self, key: str) -> Tenant | None:
        if not key:
            return None  # whatever the configuration holds
        return self._by_credential.get(hash_key(key))

    def by_identity(self, name: str) -> Tenant | None:
        """`name`: one in a verified certificate."""
        # The hash of a key is no name.
        return None if name.startswith(HASH_PREFIX) else self._by_credential.get(name)


def new_key() -> str:
    """One that nobody can guess, so that a plain hash of it is enough."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()

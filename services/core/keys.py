"""Names of KV blocks.

A prefix key names a prefix: a chain of SHA-256 over (model, tenant and salt),
then over the ids of each full block. Equal keys mean equal tokens from the very
start, the same model and the same tenant. A cryptographic hash, since a
collision would serve one tenant's text to another.

A storage key names the bytes that one engine computed for that prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from services.core.tokens import BYTES_PER_TOKEN

KEY_BYTES = 32
# Of a snapshot, in one message: 2 MiB, well below what a channel takes.
MAX_SNAPSHOT_KEYS = 1 << 16
# Of a request's cache_salt.
MAX_SALT_CHARACTERS = 256


def root_key(*, model: str, block_tokens: int, tenant: str = "", salt: str = "") -> bytes:
    """The key of the empty prefix. Parts are length-prefixed, so none can imitate another."""
    hasher = hashlib.sha256(b"firsttoken prefix key 1\n")
    for part in (model, str(block_tokens), tenant, salt):
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little"))
        hasher.update(encoded)
    return hasher.digest()


def extend_keys(last_key: bytes, packed_ids: bytes, block_tokens: int) -> list[bytes]:
    """The keys of the full blocks in `packed_ids`, which follows the prefix of `last_key`."""
    block_bytes = block_tokens * BYTES_PER_TOKEN
    keys = []
    for start in range(0, len(packed_ids) - block_bytes + 1, block_bytes):
        last_key = hashlib.sha256(last_key + packed_ids[start : start + block_bytes]).digest()
        keys.append(last_key)
    return keys


def storage_key(prefix_key: bytes, fingerprint: bytes) -> bytes:
    """`fingerprint`: engine, weights, KV layout, dtype, tensor-parallel size and rank."""
    return hashlib.sha256(prefix_key + fingerprint).digest()


def join_keys(keys: Sequence[bytes]) -> bytes:
    return b"".join(keys)


def snapshot_parts(keys: Sequence[bytes]) -> Iterator[bytes]:
    """Joined, as many as one message may carry at a time. Of no keys: one empty part."""
    for start in range(0, max(len(keys), 1), MAX_SNAPSHOT_KEYS):
        yield join_keys(keys[start : start + MAX_SNAPSHOT_KEYS])


def split_keys(joined: bytes) -> list[bytes]:
    """Raises ValueError when `joined` is not whole keys."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"must be whole keys of {KEY_BYTES} bytes; got {len(joined)} bytes")
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]

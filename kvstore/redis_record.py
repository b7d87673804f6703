"""A block as a value in Redis: a header, then its bytes.

Anybody may write under our keys, half a value may be there, and bits may flip: a
value that is not, bit for bit, what was written for the key is a miss with a reason.

Header, little-endian:
      0  4s   magic "FTKV"
      4  H    version
      6  H    bytes of fingerprint
      8  H    bytes of tenant
     10  III  index, num_tokens, num_bytes
     22  32s  storage key
     54  32s  prefix key
     86  16s  checksum of the block's bytes
    102       fingerprint, tenant (UTF-8)
         16s  checksum of the header up to here
Every version keeps the magic and the place of the version.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.tier2 import GROUP_BLOCKS, Record, Wanted
from services.core.keys import storage_key
from services.core.kvblocks import CHECKSUM_BYTES, Block, Buffer, Bytes, checksum

VERSION = 1
KEY_PREFIX = b"ft:kv:"

_MAGIC = b"FTKV"
_START = struct.Struct("<4sH")
_FIXED = struct.Struct("<4sHHHIII32s32s16s")

# Holds the header of any fingerprint and tenant that the mesh accepts.
HEADER_BYTES_READ = 1024


class Decoded(NamedTuple):
    """A verified block, or the reason why there is none: "truncated", "magic", "version",
    "header", "key", "fingerprint", "prefix_key", "index", "size" or "checksum".
    """

    reason: str
    record: Record | None = None
    # A view into the value.
    payload: Bytes | None = None


def redis_key(chain: Sequence[bytes], index: int) -> bytes:
    """Braces: Redis Cluster keeps all keys of one group on one shard."""
    group = chain[index - index % GROUP_BLOCKS]
    return b"%s{%s}:%s" % (KEY_PREFIX, group.hex().encode(), chain[index].hex().encode())


def storage_key_in(redis_key: bytes) -> bytes:
    """Empty when it is no key of ours."""
    try:
        return bytes.fromhex(redis_key.rpartition(b":")[2].decode())
    except ValueError:
        return b""


def encode(header: bytes, payload: Buffer) -> memoryview:
    """The value: one copy of the block, made without the GIL."""
    value = np.empty(len(header) + len(payload), np.uint8)
    value[: len(header)] = np.frombuffer(header, np.uint8)
    np.copyto(value[len(header) :], np.frombuffer(payload, np.uint8))
    return value.data


def encode_header(record: Record) -> bytes:
    block, tenant = record.block, record.tenant.encode()
    fixed = _FIXED.pack(
        _MAGIC,
        VERSION,
        len(block.fingerprint),
        len(tenant),
        block.index,
        block.num_tokens,
        block.num_bytes,
        block.storage_key,
        block.prefix_key,
        record.checksum,
    )
    header = fixed + block.fingerprint + tenant
    return header + checksum(header)


def decode(value: bytes, key: bytes, index: int, wanted: Wanted) -> Decoded:
    reason, record, num_header_bytes = _decode_header(value)
    if record is None:
        return Decoded(reason)
    num_bytes = len(value) - num_header_bytes
    reason = _difference(record.block, key, index, wanted) or _misfit(record.block, num_bytes)
    if reason:
        return Decoded(reason)
    payload = np.frombuffer(value, np.uint8, offset=num_header_bytes)
    if checksum(payload) != record.checksum:
        return Decoded("checksum")
    return Decoded("", record, payload)


def decode_header(value: bytes) -> Record | None:
    """From the first HEADER_BYTES_READ of a value; None when there is no header of ours."""
    return _decode_header(value)[1]


def _difference(block: Block, key: bytes, index: int, wanted: Wanted) -> str:
    if block.storage_key != key:
        return "key"
    if block.fingerprint != wanted.fingerprint:
        return "fingerprint"
    # The key is a hash of both: a header cannot claim another prefix.
    if storage_key(block.prefix_key, block.fingerprint) != key:
        return "prefix_key"
    if block.index != index:
        return "index"
    return "" if block.num_bytes == wanted.num_bytes else "size"


def _misfit(block: Block, num_bytes: int) -> str:
    if num_bytes < block.num_bytes:
        return "truncated"
    return "size" if num_bytes > block.num_bytes else ""


def _decode_header(value: bytes) -> tuple[str, Record | None, int]:
    """The reason, the record, and where the block's bytes begin."""
    if len(value) < _START.size:
        return "truncated", None, 0
    magic, version = _START.unpack_from(value)
    if magic != _MAGIC:
        return "magic", None, 0
    if version != VERSION:
        return "version", None, 0
    if len(value) < _FIXED.size:
        return "truncated", None, 0
    (_, _, num_fingerprint, num_tenant, index, num_tokens, num_bytes, key, prefix_key, digest) = (
        _FIXED.unpack_from(value)
    )
    tenant_at = _FIXED.size + num_fingerprint
    end = tenant_at + num_tenant
    if len(value) < end + CHECKSUM_BYTES:
        return "truncated", None, 0
    if checksum(value[:end]) != value[end : end + CHECKSUM_BYTES]:
        return "header", None, 0
    fingerprint, tenant = value[_FIXED.size : tenant_at], value[tenant_at:end]
    block = Block(key, prefix_key, fingerprint, index, num_tokens, num_bytes)
    # Whoever wrote a whole header wrote UTF-8; if not, no tenant has such a name.
    record = Record(block, tenant.decode(errors="replace"), digest)
    return "", record, end + CHECKSUM_BYTES

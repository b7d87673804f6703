"""KV blocks in memory that several processes have mapped.

An arena is fixed slots, each a header and then a block's bytes. A slot's generation
is raised before it is given to another block: whoever copies a block looks at the
generation before and after, and at the checksum of its own copy. So a reader needs
no lock and no answer from the owner, and the owner may die or evict at any moment.

The checksum also covers what the generation cannot: on a processor that reorders
writes, and against memory that somebody has damaged.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview | Bytes

HEADER_BYTES = 256
ALIGNMENT = 64
CHECKSUM_BYTES = 16
MAX_FINGERPRINT_BYTES = 64

# generation; magic, index, num_tokens, num_bytes; the keys; the checksum; the fingerprint.
_HEADER = struct.Struct("<Q 4sIII 32s32s16s B64s")
_GENERATION = struct.Struct("<Q")
_MAGIC = b"FTK1"


class Place(NamedTuple):
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Block:
    """Which block it is, beside its bytes."""

    storage_key: bytes
    prefix_key: bytes
    # Of engine, weights, KV layout and dtype.
    fingerprint: bytes
    # Its place in the chain, from 0.
    index: int
    num_tokens: int
    num_bytes: int


class SlotHeader(NamedTuple):
    generation: int
    block: Block
    # XXH3-128 of the bytes.
    checksum: bytes


class ArenaLayout(NamedTuple):
    """`slot_bytes` includes the header and is a multiple of ALIGNMENT."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def for_blocks(cls, num_bytes: int, memory_bytes: int) -> ArenaLayout:
        """As many slots for blocks of `num_bytes` as fit: every process computes the same."""
        slot_bytes = HEADER_BYTES + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(memory_bytes // slot_bytes, slot_bytes)

    def arena(self, memory: Bytes) -> Bytes:
        """`memory` (uint8, one dimension, at least as long) as shape (num_slots, slot_bytes)."""
        return memory[: self.num_slots * self.slot_bytes].reshape(self.num_slots, self.slot_bytes)


def checksum(data: Buffer) -> bytes:
    """XXH3-128, big-endian: 16 bytes. Releases the GIL on large buffers."""
    return xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]  # its stub knows no arrays


def write_header(arena: Bytes, slot: int, header: SlotHeader) -> None:
    """Raises ValueError when the fingerprint is too long."""
    block = header.block
    if len(block.fingerprint) > MAX_FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has at most {MAX_FINGERPRINT_BYTES} bytes")
    _HEADER.pack_into(
        arena[slot].data,
        0,
        header.generation,
        _MAGIC,
        block.index,
        block.num_tokens,
        block.num_bytes,
        block.storage_key,
        block.prefix_key,
        header.checksum,
        len(block.fingerprint),
        block.fingerprint,
    )


def clear_header(arena: Bytes, slot: int, generation: int) -> None:
    """No block lies there; whoever still reads the one before sees another generation."""
    _GENERATION.pack_into(arena[slot].data, 0, generation)
    arena[slot, _GENERATION.size : HEADER_BYTES] = 0


def read_generation(arena: Bytes, slot: int) -> int:
    return int(_GENERATION.unpack_from(arena[slot].data)[0])


def read_header(arena: Bytes, slot: int) -> SlotHeader | None:
    """None when there is none."""
    (generation, magic, index, num_tokens, num_bytes, key, prefix_key, digest, length, padded) = (
        _HEADER.unpack_from(arena[slot].data)
    )
    if magic != _MAGIC or length > MAX_FINGERPRINT_BYTES:
        return None
    block = Block(key, prefix_key, padded[:length], index, num_tokens, num_bytes)
    return SlotHeader(generation, block, digest)


def payload(arena: Bytes, slot: int, num_bytes: int) -> Bytes:
    """The block's bytes, in place."""
    return arena[slot, HEADER_BYTES : HEADER_BYTES + num_bytes]


def copy_block(arena: Bytes, place: Place, expected: Block, into: Bytes) -> str:
    """Copy a block into `into` (uint8, `num_bytes` long).

    Returns "" when it is there, whole and as expected, else the reason why it is a
    miss: "place", "generation", "header", "key", "prefix_key", "fingerprint", "index",
    "num_tokens", "size" or "checksum". What `into` then holds must not be used.
    """
    if not 0 <= place.slot < arena.shape[0]:
        return "place"
    if read_generation(arena, place.slot) != place.generation:
        return "generation"
    header = read_header(arena, place.slot)
    if header is None:
        return "header"
    reason = difference(header.block, expected)
    if reason:
        return reason
    if len(into) != expected.num_bytes or HEADER_BYTES + expected.num_bytes > arena.shape[1]:
        return "size"
    np.copyto(into, payload(arena, place.slot, expected.num_bytes))
    if read_generation(arena, place.slot) != place.generation:
        return "generation"
    return "" if checksum(into) == header.checksum else "checksum"


def difference(block: Block, expected: Block) -> str:
    """The first thing in which a block is not the expected one; "" if there is none."""
    if block == expected:
        return ""
    fields = dataclasses.fields(Block)
    name = next(f.name for f in fields if getattr(block, f.name) != getattr(expected, f.name))
    return _REASONS.get(name, name)


_REASONS = {"storage_key": "key", "num_bytes": "size"}

"""Prompts as chains of blocks, by small numbers."""

from __future__ import annotations

import hashlib

from router.prompt import Prompt
from services.core.keys import KEY_BYTES
from services.core.tokens import BYTES_PER_TOKEN

BLOCK_TOKENS = 64
ROOT = bytes(KEY_BYTES)


def key(*path: int) -> bytes:
    """Of the block at the end of this path from the root."""
    return hashlib.sha256(repr(path).encode()).digest()


def keys_of(*path: int) -> tuple[bytes, ...]:
    return tuple(key(*path[:length]) for length in range(1, len(path) + 1))


def chain(*path: int) -> bytes:
    return ROOT + b"".join(keys_of(*path))


def make_prompt(*path: int, more_tokens: int = 1) -> Prompt:
    num_tokens = len(path) * BLOCK_TOKENS + more_tokens
    return Prompt(bytes(num_tokens * BYTES_PER_TOKEN), chain(*path), BLOCK_TOKENS)

"""Which engines compute KV that can stand for each other's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 256


def fingerprint(path: Path, *parts: Any) -> bytes:
    """A digest of a model file and of `parts`, whose repr() must say all they are."""
    hasher = hashlib.sha256(_content_hash(path))
    for part in parts:
        hasher.update(repr(part).encode() + b"\n")
    return hasher.digest()


def _content_hash(path: Path) -> bytes:
    """A digest of the size, the first and last bytes, and samples evenly between them.

    Not of all bytes, which would take seconds a model and a start. It tells apart
    models and their fine-tunes, which differ everywhere; not a file with a few
    bytes changed on purpose.
    """
    size = path.stat().st_size
    hasher = hashlib.sha256(size.to_bytes(8, "little"))
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            file.seek(last * index // (NUM_SAMPLES - 1))
            hasher.update(file.read(SAMPLE_BYTES))
    return hasher.digest()

"""Token ids as bytes: packed little-endian uint32, four bytes an id."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.core.errors import InvalidArgument

TokenArray: TypeAlias = npt.NDArray[np.uint32]

BYTES_PER_TOKEN = 4
_ARRAYS_ARE_PACKED = sys.byteorder == "little" and array("I").itemsize == BYTES_PER_TOKEN


def pack(token_ids: Sequence[int] | TokenArray) -> bytes:
    # Three times as fast as numpy is with a list.
    if _ARRAYS_ARE_PACKED and isinstance(token_ids, list):
        return array("I", token_ids).tobytes()
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack(packed: bytes, *, field: str, vocabulary_size: int | None = None) -> TokenArray:
    """The ids as a read-only array.

    Raises InvalidArgument naming `field` when the length is not a multiple of
    four bytes, or when an id is not below `vocabulary_size`.
    """
    if len(packed) % BYTES_PER_TOKEN:
        raise InvalidArgument.of(
            field, f"must be whole little-endian uint32 ids, 4 bytes each; got {len(packed)} bytes"
        )
    ids = np.frombuffer(packed, dtype="<u4")
    if vocabulary_size is not None and ids.size:
        position = int(ids.argmax())
        if ids[position] >= vocabulary_size:
            raise InvalidArgument.of(
                field,
                f"ids must be below {vocabulary_size}; position {position} has {ids[position]}",
            )
    return ids

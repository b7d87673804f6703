from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import InvalidArgument
from services.core.tokens import pack, unpack


@given(ids=st.lists(st.integers(0, 2**32 - 1)))
def test_what_was_packed_comes_back(ids: list[int]) -> None:
    packed = pack(ids)

    assert len(packed) == 4 * len(ids)
    assert unpack(packed, field="token_ids").tolist() == ids


def test_ids_are_little_endian() -> None:
    assert pack([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert pack(np.array([1, 256], dtype=np.uint32)) == pack([1, 256])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_broken_id_names_the_field(length: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        unpack(bytes(length), field="token_ids")

    assert caught.value.violations[0].field == "token_ids"
    assert f"got {length} bytes" in caught.value.message


def test_an_id_out_of_the_vocabulary_names_its_position() -> None:
    packed = pack([1, 9, 10, 3])

    assert unpack(packed, field="ids", vocabulary_size=11).tolist() == [1, 9, 10, 3]
    with pytest.raises(InvalidArgument, match="must be below 10; position 2 has 10"):
        unpack(packed, field="ids", vocabulary_size=10)


def test_no_ids_are_fine() -> None:
    assert unpack(b"", field="ids", vocabulary_size=10).size == 0


def test_unpacked_ids_cannot_be_written() -> None:
    ids = unpack(pack([1]), field="ids")

    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 2

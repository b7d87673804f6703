from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.keys import (
    KEY_BYTES,
    MAX_SNAPSHOT_KEYS,
    extend_keys,
    join_keys,
    root_key,
    snapshot_parts,
    split_keys,
    storage_key,
)
from services.core.tokens import pack

ROOT = root_key(model="m", block_tokens=8)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def test_each_key_hashes_the_key_before_and_the_block() -> None:
    packed = pack(range(16))
    first = hashlib.sha256(ROOT + packed[:32]).digest()
    second = hashlib.sha256(first + packed[32:]).digest()

    assert extend_keys(ROOT, packed, 8) == [first, second]


def test_only_full_blocks_have_keys() -> None:
    assert len(extend_keys(ROOT, pack(range(7)), 8)) == 0
    assert len(extend_keys(ROOT, pack(range(8)), 8)) == 1
    assert len(extend_keys(ROOT, pack(range(15)), 8)) == 1


@given(ids=IDS, split=st.integers(0, 7))
def test_extending_in_two_steps_gives_the_same_keys(ids: list[int], split: int) -> None:
    at_once = extend_keys(ROOT, pack(ids), 8)
    head = extend_keys(ROOT, pack(ids[: 8 * split]), 8)
    tail = extend_keys(head[-1] if head else ROOT, pack(ids[8 * split :]), 8)

    assert head + tail == at_once


@given(one=IDS, other=IDS)
def test_keys_agree_as_far_as_the_tokens_do(one: list[int], other: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    common = min(len(one), len(other)) if same is None else same
    keys = zip(extend_keys(ROOT, pack(one), 8), extend_keys(ROOT, pack(other), 8), strict=False)

    assert [a == b for a, b in keys] == [
        8 * (i + 1) <= common for i in range(min(len(one), len(other)) // 8)
    ]


def test_model_tenant_salt_and_block_size_each_give_another_root() -> None:
    roots = {
        ROOT,
        root_key(model="n", block_tokens=8),
        root_key(model="m", block_tokens=16),
        root_key(model="m", block_tokens=8, tenant="t"),
        root_key(model="m", block_tokens=8, salt="t"),
        root_key(model="m", block_tokens=8, tenant="ab", salt="c"),
        root_key(model="m", block_tokens=8, tenant="a", salt="bc"),
    }

    assert len(roots) == 7


def test_other_engines_store_under_other_keys() -> None:
    assert storage_key(ROOT, b"bf16") != storage_key(ROOT, b"q8_0")


def test_joined_keys_split_again() -> None:
    keys = extend_keys(ROOT, pack(range(24)), 8)

    assert split_keys(join_keys(keys)) == keys
    assert split_keys(b"") == []


def test_half_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="whole keys of 32 bytes"):
        split_keys(bytes(KEY_BYTES + 1))


@pytest.mark.parametrize(
    ("num_keys", "num_parts"),
    [(0, 1), (1, 1), (MAX_SNAPSHOT_KEYS, 1), (MAX_SNAPSHOT_KEYS + 1, 2)],
)
def test_a_snapshot_is_cut_into_parts_that_one_message_can_carry(
    num_keys: int, num_parts: int
) -> None:
    keys = [number.to_bytes(KEY_BYTES, "big") for number in range(num_keys)]
    parts = list(snapshot_parts(keys))

    assert len(parts) == num_parts
    assert max(map(len, parts)) <= MAX_SNAPSHOT_KEYS * KEY_BYTES
    assert b"".join(parts) == join_keys(keys)

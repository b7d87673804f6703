from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.redis_record import (
    HEADER_BYTES_READ,
    decode,
    decode_header,
    encode,
    encode_header,
    redis_key,
    storage_key_in,
)
from kvstore.tier2 import GROUP_BLOCKS, Record, Wanted
from services.core.kvblocks import checksum
from tests.kvstore.redis_servers import Chain, make_chain

CHAIN = make_chain(40, tenant="grün", num_bytes=300)


def value_of(chain: Chain, index: int) -> bytes:
    return encode(encode_header(chain.records[index]), chain.payloads[index]).tobytes()


def reason_of(value: bytes, index: int = 3, wanted: Wanted = CHAIN.wanted) -> str:
    decoded = decode(value, CHAIN.keys[index], index, wanted)

    assert (decoded.record is None) == (decoded.payload is None) == bool(decoded.reason)
    return decoded.reason


def test_a_block_comes_back_as_it_was() -> None:
    decoded = decode(value_of(CHAIN, 3), CHAIN.keys[3], 3, CHAIN.wanted)

    assert decoded.reason == ""
    assert decoded.record == CHAIN.records[3]
    assert decoded.payload is not None
    assert decoded.payload.tobytes() == CHAIN.payloads[3]


@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    value = bytearray(value_of(CHAIN, 3))
    for bit in data.draw(st.sets(st.integers(0, len(value) * 8 - 1), min_size=1, max_size=20)):
        value[bit // 8] ^= 1 << bit % 8

    assert reason_of(bytes(value)) != ""


def test_no_single_flipped_bit_passes() -> None:
    whole = value_of(CHAIN, 3)
    for bit in range(len(whole) * 8):
        value = bytearray(whole)
        value[bit // 8] ^= 1 << bit % 8

        assert reason_of(bytes(value)) in ("magic", "version", "header", "checksum", "truncated")


def test_no_truncated_value_passes() -> None:
    whole = value_of(CHAIN, 3)

    assert {reason_of(whole[:length]) for length in range(len(whole))} == {"truncated"}


@given(st.binary(max_size=600))
def test_no_foreign_value_passes(value: bytes) -> None:
    assert reason_of(value) != ""


@given(st.binary(max_size=600))
def test_nothing_that_begins_like_ours_passes_or_crashes(rest: bytes) -> None:
    assert reason_of(value_of(CHAIN, 3)[:6] + rest) != ""


def test_bytes_after_the_block_are_a_miss() -> None:
    assert reason_of(value_of(CHAIN, 3) + b"x") == "size"


def test_another_blocks_value_under_the_key_is_a_miss() -> None:
    assert reason_of(value_of(CHAIN, 4)) == "key"


def test_another_tenants_value_under_the_key_is_a_miss() -> None:
    other = make_chain(8, tenant="other", num_bytes=300)

    assert reason_of(value_of(other, 3)) == "key"


def test_a_stale_fingerprint_is_a_miss() -> None:
    assert reason_of(value_of(CHAIN, 3), wanted=Wanted(b"newer engine", 300)) == "fingerprint"


def test_a_header_cannot_claim_another_engine_for_the_key() -> None:
    record = CHAIN.records[3]
    forged = record._replace(block=replace(record.block, fingerprint=b"newer engine"))
    value = encode_header(forged) + CHAIN.payloads[3]

    assert reason_of(value, wanted=Wanted(b"newer engine", 300)) == "prefix_key"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prefix_key": bytes(32)}, "prefix_key"),
        ({"index": 4}, "index"),
        ({"num_bytes": 9}, "size"),
    ],
)
def test_a_header_that_says_something_else_is_a_miss(change: dict[str, Any], reason: str) -> None:
    record = CHAIN.records[3]
    other = record._replace(block=replace(record.block, **change))

    assert reason_of(encode_header(other) + CHAIN.payloads[3]) == reason


def test_a_block_of_another_size_is_a_miss() -> None:
    assert reason_of(value_of(CHAIN, 3), wanted=CHAIN.wanted._replace(num_bytes=301)) == "size"


def test_a_later_version_is_a_miss_whatever_follows() -> None:
    value = bytearray(value_of(CHAIN, 3))
    struct.pack_into("<H", value, 4, 2)

    assert reason_of(bytes(value)) == "version"
    assert reason_of(bytes(value[:6])) == "version"


def test_the_longest_header_fits_what_is_read_of_it() -> None:
    record = CHAIN.records[0]
    longest = Record(replace(record.block, fingerprint=bytes(64)), "é" * 256, record.checksum)

    assert len(encode_header(longest)) <= HEADER_BYTES_READ


def test_a_header_alone_tells_the_tenant() -> None:
    record = decode_header(value_of(CHAIN, 3)[:HEADER_BYTES_READ])

    assert record is not None
    assert record.tenant == "grün"


def test_keys_of_a_group_share_a_tag_and_groups_do_not() -> None:
    keys = [redis_key(CHAIN.keys, index) for index in range(40)]
    tags = [key[key.index(b"{") : key.index(b"}")] for key in keys]

    assert len(set(keys)) == 40
    assert [tags.index(tag) for tag in tags] == [i - i % GROUP_BLOCKS for i in range(40)]
    assert keys[0] == b"ft:kv:{%s}:%s" % ((CHAIN.keys[0].hex().encode(),) * 2)


def test_a_key_tells_its_storage_key() -> None:
    assert storage_key_in(redis_key(CHAIN.keys, 20)) == CHAIN.keys[20]
    assert storage_key_in(b"ft:kv:{x}:nothing") == b""


def test_payloads_of_random_sizes_come_back() -> None:
    chance = random.Random(1)
    for num_bytes in (1, 2, 255, 4096, chance.randrange(5000)):
        chain = make_chain(1, num_bytes=num_bytes)
        decoded = decode(value_of(chain, 0), chain.keys[0], 0, chain.wanted)

        assert decoded.payload is not None
        assert checksum(decoded.payload) == chain.records[0].checksum

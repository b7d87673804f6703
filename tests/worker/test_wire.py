from __future__ import annotations

import contextlib

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.worker.v1 import worker_pb2
from worker.wire import decode, encode

BLOCK = worker_pb2.KvBlock(index=7, num_tokens=64, checksum=b"c" * 16, num_bytes=300, offset=5)
RESPONSE = worker_pb2.PrefillResponse(blocks=worker_pb2.KvBlocks(blocks=[BLOCK]))
VIEWS = [np.arange(200, dtype=np.uint8), np.arange(100, dtype=np.uint8)]
DATA = b"".join(view.tobytes() for view in VIEWS)


def whole() -> worker_pb2.PrefillResponse:
    response = worker_pb2.PrefillResponse(data=DATA)
    response.MergeFrom(RESPONSE)
    return response


def test_what_is_encoded_is_protobuf() -> None:
    assert worker_pb2.PrefillResponse.FromString(encode(RESPONSE, VIEWS)) == whole()


def test_what_protobuf_encodes_is_decoded() -> None:
    received = decode(whole().SerializeToString())

    assert received.response == RESPONSE
    assert received.data.tobytes() == DATA


def test_a_message_without_data_is_a_message() -> None:
    progress = worker_pb2.PrefillResponse(progress=worker_pb2.PrefillProgress(num_tokens=9))
    received = decode(encode(progress))

    assert received.response == progress
    assert not received.data


def test_data_is_not_copied() -> None:
    message = encode(RESPONSE, VIEWS)

    assert decode(message).data.obj is message


@given(st.integers(0, len(whole().SerializeToString()) - 1))
def test_a_message_that_is_cut_off_is_refused(length: int) -> None:
    message = encode(RESPONSE, VIEWS)[:length]
    try:
        received = decode(message)
    except DecodeError:
        return
    assert received.data.tobytes() != DATA


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode(message)


def test_fields_of_later_versions_are_skipped() -> None:
    varint, fixed64, fixed32 = b"\x50\x96\x01", b"\x59" + bytes(8), b"\x65" + bytes(4)
    received = decode(varint + encode(RESPONSE, VIEWS) + fixed64 + fixed32)

    assert received.response.blocks == RESPONSE.blocks
    assert received.data.tobytes() == DATA


def test_data_before_the_blocks_is_refused() -> None:
    data = worker_pb2.PrefillResponse(data=DATA).SerializeToString()
    with pytest.raises(DecodeError, match="last"):
        decode(data + RESPONSE.SerializeToString())

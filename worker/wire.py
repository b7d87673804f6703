"""PrefillResponse on the wire: KV is neither copied into a message nor out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from firsttoken.worker.v1 import worker_pb2
from worker.engines.contract import Bytes

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_DATA = worker_pb2.PrefillResponse.DATA_FIELD_NUMBER


class Received(NamedTuple):
    """`response` lacks its `data`, which lies here."""

    response: worker_pb2.PrefillResponse
    data: memoryview


def encode(response: worker_pb2.PrefillResponse, data: Sequence[Bytes] = ()) -> bytes:
    """`response`, whose `data` is empty, with `data` in its place."""
    encoded = response.SerializeToString()
    if not data:
        return encoded
    key = bytes([_DATA << 3 | _LENGTH_DELIMITED])
    length = sum(len(view) for view in data)
    return b"".join((encoded, key, _varint(length), *(view.data for view in data)))


def decode(message: bytes) -> Received:
    """Raises DecodeError."""
    view = memoryview(message)
    position, data_at, data = 0, len(view), view[:0]
    while position < len(view):
        start = position
        key, position = _read_varint(view, position)
        length, position = _payload_at(view, key & 7, position)
        end = position + length
        if end > len(view):
            raise DecodeError("the message is cut off")
        if key >> 3 == _DATA:
            data_at, data = start, view[position:end]
        elif data and key >> 3 < _DATA:
            raise DecodeError("data must come last")
        position = end
    return Received(worker_pb2.PrefillResponse.FromString(message[:data_at]), data)


def _payload_at(view: memoryview, wire_type: int, position: int) -> tuple[int, int]:
    """How long a field's payload is, and where it begins."""
    if wire_type == _LENGTH_DELIMITED:
        return _read_varint(view, position)
    if wire_type == _VARINT:
        _, end = _read_varint(view, position)
        return end - position, position
    if wire_type in _FIXED_BYTES:
        return _FIXED_BYTES[wire_type], position
    raise DecodeError(f"PrefillResponse has no field of wire type {wire_type}")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    """The value, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if position == len(view):
            break
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("the message is cut off")

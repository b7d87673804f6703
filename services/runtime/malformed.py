"""Why a message does not parse: the protobuf parser only says that it does not.

Walks the wire bytes with the message's descriptor. Pure, and slow: only called
once parsing has failed.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from services.core.errors import Violation

MAX_DEPTH = 100  # as protobuf's own parsers

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_PACKED_BYTES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}


class _Truncated(Exception):
    pass


class _Key(NamedTuple):
    number: int
    wire_type: int


def find_violation(descriptor: Descriptor, data: bytes) -> Violation:
    """The first field at which `data` stops being a message of `descriptor`."""
    found = _walk(descriptor, memoryview(data), "", 0)
    return found or Violation("", f"must be an encoded {descriptor.full_name}")


def _walk(descriptor: Descriptor, data: memoryview, prefix: str, depth: int) -> Violation | None:
    cursor = _Cursor(data)
    seen: Counter[str] = Counter()
    path = prefix.removesuffix(".")
    try:
        while not cursor.at_end:
            path = prefix.removesuffix(".")
            key = cursor.read_key()
            field = descriptor.fields_by_number.get(key.number)
            if field is not None:
                path = f"{prefix}{field.name}{_index(field, seen)}"
            payload = cursor.read_payload(key)
            if field is None or payload is None:
                continue
            if violation := _check(field, payload, path, depth):
                return violation
    except _Truncated:
        return Violation(path, f"is cut off or corrupt at byte {cursor.position}")
    return None


def _check(field: FieldDescriptor, payload: memoryview, path: str, depth: int) -> Violation | None:
    if field.type == FieldDescriptor.TYPE_STRING:
        return _check_utf8(payload, path)
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type:
        if depth == MAX_DEPTH:
            return Violation(path, f"is nested more than {MAX_DEPTH} messages deep")
        return _walk(field.message_type, payload, f"{path}.", depth + 1)
    if field.is_repeated and field.type != FieldDescriptor.TYPE_BYTES:
        _read_packed(payload, _PACKED_BYTES.get(field.type))
    return None


def _read_packed(payload: memoryview, num_bytes: int | None) -> None:
    """`num_bytes`: of each value; None for varints."""
    cursor = _Cursor(payload)
    while not cursor.at_end:
        if num_bytes is None:
            cursor.read_varint()
        else:
            cursor.take(num_bytes)


def _check_utf8(payload: memoryview, path: str) -> Violation | None:
    try:
        str(payload, "utf-8")
    except UnicodeDecodeError as error:
        byte = payload[error.start]
        return Violation(path, f"must be valid UTF-8; byte {error.start} is 0x{byte:02x}")
    return None


def _index(field: FieldDescriptor, seen: Counter[str]) -> str:
    if not field.is_repeated:
        return ""
    seen[field.name] += 1
    return f"[{seen[field.name] - 1}]"


class _Cursor:
    """Reads keys and values off the wire; raises _Truncated where they make no sense."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    @property
    def at_end(self) -> bool:
        return self.position == len(self._data)

    def read_key(self) -> _Key:
        value = self.read_varint()
        key = _Key(value >> 3, value & 7)
        if key.number == 0 or value >> 32:
            raise _Truncated
        return key

    def read_payload(self, key: _Key) -> memoryview | None:
        """The bytes of a length-delimited field; None for every other kind, skipped."""
        if key.wire_type == _BYTES:
            return self.take(self.read_varint())
        if key.wire_type == _VARINT:
            self.read_varint()
        elif key.wire_type in _FIXED_BYTES:
            self.take(_FIXED_BYTES[key.wire_type])
        elif key.wire_type == _GROUP:
            self._skip_group(key.number)
        else:
            raise _Truncated
        return None

    def _skip_group(self, number: int) -> None:
        open_groups = [number]
        while open_groups:
            key = self.read_key()
            if key.wire_type == _GROUP:
                open_groups.append(key.number)
            elif key.wire_type != _END_GROUP:
                self.read_payload(key)
            elif key.number != open_groups.pop():
                raise _Truncated

    def read_varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise _Truncated

    def take(self, length: int) -> memoryview:
        if length > len(self._data) - self.position:
            raise _Truncated
        start, self.position = self.position, self.position + length
        return self._data[start : self.position]

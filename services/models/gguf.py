"""The metadata of a GGUF file: what a model says about itself, its vocabulary included.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only the
key-value pairs at the head are read; the tensors behind them are not touched.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Container
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_NUMBERS = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}

_LENGTH = _NUMBERS[10]


def read_metadata(path: Path, *, without: Container[str] = ()) -> dict[str, Any]:
    """Key to value: numbers, strings, booleans, and lists of one of these.

    Lists of strings `without` which the caller can do are walked over: theirs are left empty.
    Raises OSError when the file cannot be read, ValueError when it is no GGUF
    file or ends too early.
    """
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path}: is no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data, without).metadata()
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error


class _Reader:
    """A position in the file, moved on by each reading."""

    def __init__(self, data: mmap.mmap, without: Container[str]) -> None:
        self._data = data
        self._without = without
        self._size = len(data)
        self._offset = len(_MAGIC)

    def metadata(self) -> dict[str, Any]:
        version = self._number(4)
        if version not in _VERSIONS:
            raise ValueError(f"GGUF version must be 2 or 3, little-endian; got {version}")
        self._number(10)  # tensors
        num_pairs = self._number(10)
        return dict(self._pair() for _ in range(num_pairs))

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        kind = self._number(4)
        if kind == _STRING:
            return key, self._string()
        if kind == _ARRAY:
            return key, self._array(self._number(4), self._number(10), key in self._without)
        return key, self._number(kind)

    def _array(self, kind: int, count: int, unwanted: bool) -> list[Any]:
        if kind == _STRING:
            return self._strings(count, unwanted)
        # Arrays of arrays are allowed by the format, and in use nowhere.
        number = self._layout(kind)
        packed = self._take(count * number.size)
        return [value for (value,) in number.iter_unpack(packed)]

    def _strings(self, count: int, unwanted: bool) -> list[str]:
        """As `_string` each, in one loop: a vocabulary is a hundred thousand of them."""
        data, size, start = self._data, self._size, self._offset
        unpack_length, length_size = _LENGTH.unpack_from, _LENGTH.size
        strings: list[str] = []
        for _ in range(count):
            self._offset = start  # where reading one by one says what is wrong
            if start + length_size > size:
                self._string()
            end = start + length_size + unpack_length(data, start)[0]
            if end > size:
                self._string()
            if not unwanted:
                strings.append(data[start + length_size : end].decode())
            start = end
        self._offset = start
        return strings

    def _number(self, kind: int) -> Any:
        number = self._layout(kind)
        return number.unpack(self._take(number.size))[0]

    def _layout(self, kind: int) -> struct.Struct:
        if kind not in _NUMBERS:
            raise ValueError(f"unknown type {kind} of a value at byte {self._offset}")
        return _NUMBERS[kind]

    def _string(self) -> str:
        return self._take(self._number(10)).decode()

    def _take(self, size: int) -> bytes:
        start, end = self._offset, self._offset + size
        if end > self._size:
            raise ValueError(f"ends early: {size} bytes wanted at byte {start} of {self._size}")
        self._offset = end
        return self._data[start:end]

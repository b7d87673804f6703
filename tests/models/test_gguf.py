from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.models.catalog import find_model
from services.models.gguf import read_metadata


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def head(*pairs: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs)


EVERY_TYPE: dict[str, tuple[bytes, Any]] = {
    "u8": (pair("u8", 0, b"\xff"), 255),
    "i8": (pair("i8", 1, b"\xff"), -1),
    "u16": (pair("u16", 2, b"\xff\xff"), 65535),
    "i16": (pair("i16", 3, b"\xff\xff"), -1),
    "u32": (pair("u32", 4, struct.pack("<I", 4_000_000_000)), 4_000_000_000),
    "i32": (pair("i32", 5, struct.pack("<i", -7)), -7),
    "f32": (pair("f32", 6, struct.pack("<f", 0.5)), 0.5),
    "bool": (pair("bool", 7, b"\x01"), True),
    "string": (pair("string", 8, text("é🙂")), "é🙂"),
    "u64": (pair("u64", 10, struct.pack("<Q", 1 << 63)), 1 << 63),
    "i64": (pair("i64", 11, struct.pack("<q", -1 << 63)), -1 << 63),
    "f64": (pair("f64", 12, struct.pack("<d", 0.1)), 0.1),
    "strings": (pair("strings", 9, array(8, 2, text("a") + text(""))), ["a", ""]),
    "numbers": (pair("numbers", 9, array(5, 2, struct.pack("<ii", -1, 1))), [-1, 1]),
    "nothing": (pair("nothing", 9, array(4, 0, b"")), []),
}
WHOLE = head(*(encoded for encoded, _ in EVERY_TYPE.values()))


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], dict[str, Any]]:
    def read_bytes(content: bytes) -> dict[str, Any]:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return read_metadata(path)

    return read_bytes


def test_every_type_is_read_and_tensors_behind_are_not(
    read: Callable[[bytes], dict[str, Any]],
) -> None:
    values = read(WHOLE + b"tensors")

    assert values == {key: value for key, (_, value) in EVERY_TYPE.items()}


def test_metadata_of_the_embedded_model() -> None:
    metadata = read_metadata(find_model("smollm2-135m-instruct").gguf_path)

    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == 8192
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata["tokenizer.ggml.merges"][:2] == ["Ġ t", "Ġ a"]


def test_strings_that_nobody_wants_are_walked_over(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(WHOLE)

    expected = {key: value for key, (_, value) in EVERY_TYPE.items()} | {"strings": []}
    assert read_metadata(path, without=("strings",)) == expected
    path.write_bytes(head(pair("strings", 9, array(8, 2, text("a") + text("b")[:-1]))))
    with pytest.raises(ValueError, match="ends early: 1 bytes wanted"):
        read_metadata(path, without=("strings",))


def test_file_cut_at_any_byte_is_refused(read: Callable[[bytes], dict[str, Any]]) -> None:
    for size in range(len(WHOLE)):
        with pytest.raises(ValueError, match=r"model\.gguf: (is no GGUF file|ends early)"):
            read(WHOLE[:size])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no GGUF file"),
        (b"PK\x03\x04", "is no GGUF file"),
        (head(version=1), "version must be 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version must be 2 or 3"),
        (head(pair("key", 13, b"")), "unknown type 13"),
        (head(pair("key", 9, array(9, 1, b""))), "unknown type 9"),
        (head(pair("key", 9, array(8, 1 << 62, b""))), "ends early"),
        (head(pair("key", 9, array(4, 1 << 62, b""))), "ends early"),
        (head(pair("key", 8, struct.pack("<Q", 1) + b"\xff")), "utf-8"),
    ],
)
def test_what_is_no_metadata_is_refused_with_the_reason(
    read: Callable[[bytes], dict[str, Any]], content: bytes, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(content)


def test_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / "gone.gguf")

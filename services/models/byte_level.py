"""Byte-level BPE's spelling: every byte of a token as one printable character."""

from __future__ import annotations


def _undo_byte_level() -> dict[int, int]:
    """From the character that spells a byte to the byte.

    Bytes that print are their own character, the others follow from U+0100.
    Characters that spell no byte map to one that Latin-1 cannot encode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    spelled = {0x100 + index: byte for index, byte in enumerate(others)}
    return spelled | dict.fromkeys(others, 0x10FFFF)


_BYTE_OF_CHARACTER = _undo_byte_level()


def spelled_bytes(spelling: str) -> bytes:
    """What a token of a byte-level vocabulary adds to a text."""
    try:
        return spelling.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        # Not spelled in bytes after all: it stands for itself, as in HF's decoder.
        return spelling.encode()

"""Text that others wrote, on a terminal."""

from __future__ import annotations

import json


def plain(text: str) -> str:
    """Nothing in it moves the cursor, ends the line, or turns the direction of what follows."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def quoted(text: str) -> str:
    return plain(json.dumps(text, ensure_ascii=False))

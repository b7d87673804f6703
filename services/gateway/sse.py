"""Server-sent events, byte by byte as OpenAI writes them."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"

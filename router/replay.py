"""What a client has been told, read back from the messages that went through. Pure.

Messages are forwarded unread; only when the worker behind them dies are they parsed,
once, so that another worker can go on where it ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from firsttoken.worker.v1 import worker_pb2
from services.core.tokens import BYTES_PER_TOKEN


class Told(NamedTuple):
    # Packed little-endian uint32.
    answer_ids: bytes
    # Of its text, which may lag behind the ids.
    num_characters: int

    @property
    def num_tokens(self) -> int:
        return len(self.answer_ids) // BYTES_PER_TOKEN


def replay(messages: Iterable[bytes]) -> Told:
    """`messages`: chunks, of one worker or of several that went on after each other."""
    chunks = [worker_pb2.GenerateResponse.FromString(message).chunk for message in messages]
    return Told(
        b"".join(chunk.token_ids for chunk in chunks), sum(len(chunk.text) for chunk in chunks)
    )

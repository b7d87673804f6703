"""What a client has been told, read back from the messages that went through. Pure.

Messages are forwarded unread; only when the answer breaks off are they parsed, once,
so that another worker can go on where it ended, and the ledger has the first token's times.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.tokens import BYTES_PER_TOKEN


class Told(NamedTuple):
    # Packed little-endian uint32.
    answer_ids: bytes
    # Of its text, which may lag behind the ids.
    num_characters: int
    # Of the worker that gave the first token; None: there was none.
    ledger: common_pb2.Ledger | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.answer_ids) // BYTES_PER_TOKEN

    def followed_by(self, more: Told) -> Told:
        """`ledger`: of the first of the two that has one."""
        return Told(
            self.answer_ids + more.answer_ids,
            self.num_characters + more.num_characters,
            self.ledger or more.ledger,
        )


NOTHING_TOLD = Told(b"", 0)


def replay(messages: Iterable[bytes]) -> Told:
    """`messages`: chunks, of one worker or of several that went on after each other."""
    chunks = [worker_pb2.GenerateResponse.FromString(message).chunk for message in messages]
    ledgers = (chunk.ledger for chunk in chunks if chunk.HasField("ledger"))
    return Told(
        b"".join(chunk.token_ids for chunk in chunks),
        sum(len(chunk.text) for chunk in chunks),
        next(ledgers, None),
    )

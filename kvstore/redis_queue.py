"""Blocks on their way to Redis, bounded in bytes."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Write(NamedTuple):
    key: bytes
    value: memoryview


class WriteQueue:
    """First in, first out: a chain's first blocks, which others share, go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._writes: deque[Write] = deque()
        self._keys: set[bytes] = set()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._writes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def has_room(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes <= self._max_bytes

    def push(self, write: Write) -> None:
        assert self.has_room(len(write.value))
        self._writes.append(write)
        self._keys.add(write.key)
        self.num_bytes += len(write.value)

    def take(self, max_bytes: int) -> list[Write]:
        """The oldest; at least one if there is one."""
        taken: list[Write] = []
        while self._writes and (not taken or len(self._writes[0].value) <= max_bytes):
            write = self._writes.popleft()
            self._keys.discard(write.key)
            self.num_bytes -= len(write.value)
            max_bytes -= len(write.value)
            taken.append(write)
        return taken

    def clear(self) -> int:
        """How many were dropped."""
        return len(self.take(self.num_bytes))

    def check_integrity(self) -> None:
        assert self.num_bytes == sum(len(write.value) for write in self._writes)
        assert self._keys == {write.key for write in self._writes}
        assert len(self._keys) == len(self._writes)

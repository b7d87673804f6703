"""When blocks were written to the KV store: how much of that overlaps a request. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from worker.messages import StoredBlock

# What is older is not counted: a look must stay cheap, since a first token may wait for it.
MAX_WRITES = 128


@dataclass(slots=True)
class Write:
    """Blocks of one chain that follow each other, while they are written and after it."""

    first_index: int
    prefix_keys: Sequence[bytes]
    began_s: float
    ended_s: float = math.inf


class RecentWrites:
    def __init__(self) -> None:
        self._writes: deque[Write] = deque(maxlen=MAX_WRITES)

    def begin(self, blocks: Sequence[StoredBlock], now_s: float) -> Write:
        """One after the other: the one before has ended."""
        keys = [block.prefix_key for block in blocks]
        write = Write(blocks[0].block_index, keys, now_s)
        self._writes.append(write)
        return write

    def overlap_s(
        self, prefix_keys: Sequence[bytes], *, first_index: int, since_s: float, until_s: float
    ) -> float:
        """Of the writes of a chain's blocks from `first_index` on. The first key is the root's."""
        total_s = 0.0
        for write in reversed(self._writes):
            if write.ended_s <= since_s:
                break
            # Keys are chained: where any later one is the same, so is this one.
            index = max(write.first_index, first_index)
            place = index - write.first_index
            if (
                place < len(write.prefix_keys)
                and index + 1 < len(prefix_keys)
                and prefix_keys[index + 1] == write.prefix_keys[place]
            ):
                both_s = min(write.ended_s, until_s) - max(write.began_s, since_s)
                total_s += max(0.0, both_s)
        return total_s

"""A prefix cache, as the names of its blocks alone: what a real one is predicted by. Pure.

A hit is a run of whole blocks from the start of the prompt. What was used longest ago is
evicted, a chain's tail before its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice


class Cache:
    """Blocks, those used longest ago first. `num_blocks` None: it never forgets."""

    def __init__(self, num_blocks: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._blocks: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[bytes]) -> int:
        """How many blocks of `chain` are here. A block never outlives those before it."""
        blocks = self._blocks
        if not chain or chain[0] not in blocks:
            return 0
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def use(self, chain: Sequence[bytes]) -> tuple[bytes, ...]:
        """Its blocks are the ones used last; what then is too much goes, and is returned."""
        blocks = self._blocks
        if self.num_blocks is None:
            blocks.update(dict.fromkeys(chain))
            return ()
        # What does not fit is not kept: its head is worth more than its tail.
        for key in reversed(chain[: self.num_blocks]):
            blocks.pop(key, None)
            blocks[key] = None
        evicted = tuple(islice(blocks, max(0, len(blocks) - self.num_blocks)))
        for key in evicted:
            del blocks[key]
        return evicted

    def check_integrity(self) -> None:
        assert self.num_blocks is None or len(self._blocks) <= self.num_blocks
